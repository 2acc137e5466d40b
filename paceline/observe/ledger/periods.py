"""Which of a lineage's records are valid for which steps of a run, and how far it must be exact.

    generation 0    0 ─────────────────── 7 · · · · 9        steps 7, 8 are void:
    generation 1                          7 ─────────── 12 · 14
                                                        │     └ under way: not all ranks wrote it
                                                        └ all ranks did, or a checkpoint holds it

A generation's records are valid for the steps from its start to the earliest start of a descendant.
Steps that a checkpoint, a later generation or the run's end holds are committed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.cluster.membership.lineage import Lineage
from paceline.observe.ledger.history import GenerationRecords
from paceline.observe.ledger.reading import History


@dataclass(frozen=True, kw_only=True)
class Period:
    """Range of steps for which the records of one generation are the valid ones.

    Attributes:
        number: the generation's number; the next known one's where it has no event file.
        start: the first step.
        end: the step after the last one; for the last period, the run's end.
    """

    number: int
    generation: GenerationRecords
    start: int
    end: int

    @property
    def members(self) -> tuple[str, ...]:
        """The generation's members, in rank order."""
        return max(self.generation.members, key=len, default=())

    def reach(self) -> dict[int, int]:
        """Return of each rank before which step its lines end."""
        reach = dict.fromkeys(range(len(self.members)), self.start)
        for stretch in self.generation.stretches:
            reach[stretch.rank] = max(reach.get(stretch.rank, self.start), stretch.end)
        return reach


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Assignment of each step to the generation whose records count.

    Attributes:
        lineage: the generations in order, the oldest first; () if there is no step.
        periods: the periods, without gaps between them; the first begins at the run's first step.
        committed: number of steps that can't be undone, because a checkpoint contains them, a later
            generation resumed after them, or the run ended.
        done: number of steps whose samples must each have been trained exactly once, because the
            steps are committed or all ranks have passed them.
        begun: number of steps that at least one rank recorded.
    """

    lineage: Lineage
    periods: tuple[Period, ...]
    committed: int
    done: int
    begun: int


def timeline(history: History, lineage: Lineage) -> Timeline:
    """Find which lines of a lineage are valid, and how far the run must be exact by them."""
    total = history.extent.total
    periods = tuple(reversed(list(_backwards(history, lineage))))
    last = periods[-1]
    saved = max(min(period.generation.saved, period.end) for period in periods)
    ended = min(total, last.generation.total) if last.generation.ended else 0
    committed = max(last.start, saved, ended)
    reach = [min(step, total) for step in last.reach().values()] or [committed]
    done = max(committed, min(reach))
    return Timeline(
        lineage=lineage,
        periods=periods,
        committed=committed,
        done=done,
        begun=max(done, *reach),
    )


def _backwards(history: History, lineage: Lineage) -> Iterator[Period]:
    """Yield the periods from the last to the first, which is a gap if no generation covers it."""
    end = history.extent.total
    number = 0
    nothing = True
    for ancestor in reversed(lineage):
        generation = history.generations.get(ancestor.id)
        if generation is None:
            generation = GenerationRecords(key=ancestor.id, number=number)
        start = max(0, min(ancestor.start, end))
        number = generation.number
        if start < end or nothing:
            yield Period(number=number, generation=generation, start=start, end=end)
        end = start
        nothing = False
        if generation.foreign:
            return  # what was before came with another run's checkpoint
    if nothing or end > 0:
        gap = GenerationRecords(key="", number=number)
        yield Period(number=number, generation=gap, start=0, end=end)
