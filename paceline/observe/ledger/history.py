"""What a run's event files say, packed: millions of steps become a few thousand stretches.

In step after step of an epoch a rank trains the same part of each batch, here columns 16 to 32:

    step      40      41      42          a batch begins at (step - epoch * steps) * batch
    rank 0    0-16    0-16    0-16
    rank 1    16-32   16-32   16-32    >  one stretch: rank 1, steps 40 to 43, columns 16 to 32

Each line also has the shares of all ranks, as the data order divides the batch: cuts 0, 16, 32.

These types hold what the lines say, right or wrong; `proof` checks it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace

from paceline.cluster.membership.lineage import Lineage
from paceline.errors import many


@dataclass(frozen=True, kw_only=True)
class Extent:
    """Expected size of a run: samples, steps, epochs and batch size.

    Attributes:
        samples: samples per epoch.
        steps: steps per epoch.
        epochs: epochs of the run, in its start with the most; None if only the script knows the
            number.
        batch: samples per step, over all ranks; the last step of an epoch may have fewer samples.
        drawn: whether a sampler has drawn the samples, of which two may then be the same.
    """

    samples: int
    steps: int
    epochs: int | None
    batch: int
    drawn: bool = False

    def prolonged(self, other: Extent) -> Extent | None:
        """Return the extent of both starts: that of more epochs; None if they are of two runs."""
        if replace(self, epochs=None) != replace(other, epochs=None):
            return None
        if self.epochs is None or other.epochs is None:
            return self if self == other else None
        return self if self.epochs >= other.epochs else other

    def __str__(self) -> str:
        epochs = "" if self.epochs is None else f" in each of {many(self.epochs, 'epoch')}"
        return (
            f"{many(self.samples, 'sample')} and {many(self.steps, 'step')}{epochs}, with "
            f"{self.batch:,} samples a step"
        )

    @property
    def total(self) -> int:
        """Count the steps of the run; without an end where only a script knows it."""
        return sys.maxsize if self.epochs is None else self.epochs * self.steps

    def reached(self, epoch: int, step: int) -> int:
        """Count the samples of an epoch in the run's first `step` steps."""
        return max(0, min((step - epoch * self.steps) * self.batch, self.samples))


@dataclass(slots=True, kw_only=True)
class Stretch:
    """Consecutive steps in which a rank trained the same slice of each batch.

    Attributes:
        member: the member whose file this is, as `GenerationRecords.members` names it.
        rank: the member's rank.
        epoch: the epoch number that the rank recorded.
        start: the first step, counted from the run's first step.
        end: the step after the last one.
        first: the first column (a sample's position within the batch), counted from 0.
        last: the column after the last one.
        cuts: the columns at which the shares of all ranks begin, in rank order, and the end of the
            last one; empty in lines of earlier versions.
        skipped: number of samples per step that couldn't be read.
    """

    member: str
    rank: int
    generation: int
    epoch: int
    start: int
    end: int
    first: int
    last: int
    cuts: tuple[int, ...]
    skipped: int


@dataclass(kw_only=True)
class GenerationRecords:
    """Records of one generation, as its ranks wrote them.

    Attributes:
        key: the generation's id; `#<number>` in a generation of an earlier version.
        headers: the set of what the ranks recorded of its lineage: the generations from which it
            descends, and itself. It has one element if the ranks agree, and is empty in a
            generation of an earlier version.
        members: the set of the members that the ranks recorded, in rank order: `member <id>`, or
            `rank <r>` in a generation of an earlier version. It has one element if the ranks agree.
        restores: the set of steps at which its ranks began: 0, or the first step after a restore.
            It has one element if the ranks agree, and is empty if the generation didn't begin.
        foreign: whether it resumed from another run's checkpoint.
        total: number of the run's steps, by its start; later starts may have more epochs.
        saved: number of steps that its newest checkpoint contains.
        ended: whether it completed the run.
        stretches: the stretches of steps that its ranks trained.
        left: the ranks whose files continue with a later generation.
    """

    key: str
    number: int
    headers: set[Lineage] = field(default_factory=set)
    members: set[tuple[str, ...]] = field(default_factory=set)
    restores: set[int] = field(default_factory=set)
    foreign: bool = False
    total: int = sys.maxsize
    saved: int = 0
    ended: bool = False
    stretches: list[Stretch] = field(default_factory=list)
    left: set[int] = field(default_factory=set)

    def add(self, more: GenerationRecords) -> None:
        """Add lines that don't say to which generation of this number they belong."""
        self.restores |= more.restores
        self.foreign |= more.foreign
        self.saved = max(self.saved, more.saved)
        self.ended |= more.ended
        self.stretches += more.stretches

    @property
    def start(self) -> int | None:
        """The number of completed steps from which it started; None if no line records it.

        The lines `restore` have it exactly. Where an optimizer's step trains several batches, each
        counts as a step here, and the header names the last one of them.
        """
        starts = self.restores or {lineage[-1].start for lineage in self.headers}
        return min(starts or {stretch.start for stretch in self.stretches}, default=None)

    @property
    def ancestors(self) -> Lineage:
        """The recorded generations from which it descends, the oldest first."""
        return max(self.headers, key=len)[:-1] if self.headers else ()

    @property
    def has_all_shares(self) -> bool:
        """Whether lines have the shares of all ranks; those of earlier versions don't."""
        return any(stretch.cuts for stretch in self.stretches)
