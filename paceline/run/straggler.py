"""The straggler of an epoch, where ranks may be in different steps: the rank that held others back.

A rank's own time of an epoch is that of its steps without waits for other ranks. The others have
waited for the slowest one, in all, for the difference of the own times:

    held back = the slowest rank's own time - the median of the others'

In a pipeline a stage is slow where each of its ranks is, so the means over their ranks are compared
in place of the ranks' times: another cut gives a stage less to compute.

A rank that is slow now and then holds others back by little: they have trained on meanwhile, as far
as staleness allows, and are slow at other times themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import NamedTuple

import torch

from paceline.comm.communicator import total
from paceline.errors import Message
from paceline.generation.run import Run
from paceline.replica.group import AnyReplica
from paceline.run.extension import Extension

LEAST_SHARE = 0.05  # of an epoch; a rank that holds others back by less isn't named
LEAST_S = 1.0  # likewise: short epochs differ by chance
_MOST_BEHIND = 63  # versions that a histogram of staleness tells apart


class Straggler(NamedTuple):
    """A rank, or a stage, that held others back.

    Attributes:
        rank: the rank; of a stage, the first one.
        seconds: for which half of the others, or more, waited for it.
        share: of the epoch's time.
        stage: its number; None: a rank.
    """

    rank: int
    seconds: float
    share: float
    stage: int | None = None


def straggler_of(own: Sequence[float], seconds: float) -> Straggler | None:
    """Return the straggler of an epoch; None: no rank held others back for long.

    Args:
        own: (ranks,) own times in seconds.
        seconds: of the epoch.
    """
    slowest = max(range(len(own)), key=own.__getitem__)
    others = [time for rank, time in enumerate(own) if rank != slowest]
    if not others:
        return None
    held = own[slowest] - median(others)
    named = held >= LEAST_S and held > LEAST_SHARE * seconds
    return Straggler(slowest, held, held / seconds) if named else None


class RanksApart(Extension):
    """Ranks, or stages, in different steps: the straggler of an epoch, and its staleness histogram.

    Args:
        run: the run, which gets a note of each new straggler.
        replica: this rank's.
        measured: the ranks' shares follow their speeds.
    """

    def __init__(self, run: Run, replica: AnyReplica, *, measured: bool) -> None:
        self._run = run
        self._replica = replica
        self._measured = measured
        self._straggler: Straggler | None = None  # of the last epoch
        self._began: tuple[float, float] | None = None  # the first step: now, and own seconds
        self._named: set[int] = set()  # the ranks that had a note

    def begin_generation(self) -> None:
        """Measure anew, from the next step on: ranks have other numbers."""
        self._began = None
        self._named.clear()

    def begin_step(self, number: int) -> None:
        """Begin an epoch with its first step here."""
        if self._began is None:
            self._began = self._now()

    def leave_steps(self) -> None:
        """Find the straggler of the steps since the first one; collective.

        Raises:
            CommError: a peer was lost, or silent.
        """
        self._straggler = None
        context = self._run.context
        if context.mesh.lengths.get("stage", 1) == 1 and not self._stale:
            return
        now = self._now()
        began = self._began or now
        self._began = None
        world = context.world
        times = torch.zeros(2, world.size, dtype=torch.float64)  # in all, and own
        times[:, world.rank] = torch.tensor(now, dtype=torch.float64) - torch.tensor(began)
        communicator = context.group("all", "steps")
        both = total(communicator, times, "the ranks' own times of an epoch")
        straggler = self._straggler_of(both[1].tolist(), max(both[0].tolist()))
        if straggler is not None and straggler.rank not in self._named:
            self._named.add(straggler.rank)
            self._run.note(self._sentence(straggler), shown=self._run.leads)
        self._straggler = straggler

    def epoch_fields(self) -> Mapping[str, object]:
        """Return the straggler, and how often reads were 0, 1, … versions behind; collective."""
        return {"staleness": self._take_staleness(), "straggler": self._straggler}

    @property
    def _stale(self) -> bool:
        """Whether ranks read parameters that may be behind those of other ranks."""
        between = self._replica.equal_between_steps or self._replica.rounds is not None
        return not (between or self._run.context.summaries.alone)

    def _take_staleness(self) -> list[int]:
        if not self._stale:
            return []
        counts = torch.zeros(_MOST_BEHIND + 1, dtype=torch.int64)
        for behind, count in self._replica.stale_reads.items():
            counts[min(behind, _MOST_BEHIND)] += count
        self._replica.stale_reads.clear()
        communicator = self._run.context.group("all", "steps")
        summed = total(communicator, counts, "the sum of staleness histograms")
        last = max(summed.nonzero().flatten().tolist(), default=-1)
        return [int(count) for count in summed[: last + 1].tolist()]

    def _straggler_of(self, own: Sequence[float], seconds: float) -> Straggler | None:
        mesh = self._run.context.mesh
        if mesh.lengths.get("stage", 1) == 1:
            return straggler_of(own, seconds)
        stages = [*zip(*mesh.lines("stage"), strict=True)]  # by stage, its ranks
        found = straggler_of([mean(own[rank] for rank in ranks) for ranks in stages], seconds)
        return found and found._replace(rank=stages[found.rank][0], stage=found.rank)

    def _now(self) -> tuple[float, float]:
        timeline = self._run.timeline
        return timeline.now(), timeline.own_seconds()

    def _sentence(self, straggler: Straggler) -> Message:
        if straggler.stage is not None:
            return Message(
                "Stage {} computes for {:.3g} s longer than the others, {:.0%} of the epoch, for "
                "which they wait: move a cut so that it has fewer blocks, or give it a faster "
                "machine.",
                straggler.stage,
                straggler.seconds,
                straggler.share,
            )
        hint = "staleness hides unsteady speeds only: {--shares} measured gives it fewer samples"
        return Message(
            "{} held the others back for {:.3g} s, {:.0%} of the epoch"
            f"{'' if self._measured else f'; {hint}'}.",
            self._run.context.world.generation.describe(straggler.rank),
            straggler.seconds,
            straggler.share,
        )
