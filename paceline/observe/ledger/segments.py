"""Steps in which all ranks did the same as in the step before, so that one of them is judged.

    rank 0    |---------------------|--|         a stretch ends where an epoch's short batch begins
    rank 1    |------|  |-----------|--|
    segments  |  a   |b |     c     |d |

Here rank 1 wrote nothing of the steps b. A member's file can lack its last lines, or be missing.
Then the other members' lines prove its share of committed steps, which all ranks have trained. They
prove nothing of a step that a member left out before later lines of its own.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from paceline.observe.ledger.history import Extent, Stretch
from paceline.observe.ledger.periods import Period, Timeline


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive steps of one epoch with unchanged batch slices of all ranks.

    Attributes:
        epoch: the epoch that contains the steps.
        start: the first step, counted from the run's first step.
        end: the step after the last one.
        begin: the position in the epoch at which the first step's batch begins.
        length: number of samples per batch.
        owed: whether each sample of these steps must have been trained exactly once; if False, the
            steps may be unfinished.
        shares: what each rank trained in these steps.
        substituted: those of the shares that only other members' lines prove.
        absent: the ranks that trained nothing in these steps.
        holes: those of the absent ranks whose event files contain later steps.
    """

    epoch: int
    start: int
    end: int
    begin: int
    length: int
    owed: bool
    shares: tuple[Stretch, ...]
    substituted: tuple[Stretch, ...]
    absent: tuple[int, ...]
    holes: tuple[int, ...]


def segments(extent: Extent, period: Period, times: Timeline) -> Iterator[Segment]:
    """Cut a period wherever a share changes, and where an epoch or its short last batch begins."""
    end = min(period.end, times.begun)
    reach = period.reach()
    waiting = sorted(period.generation.stretches, key=lambda stretch: -stretch.start)
    shares: list[Stretch] = []
    cuts = {period.start, times.done, end}
    for epoch in range(period.start // extent.steps, -(-end // extent.steps)):
        cuts.update((epoch * extent.steps, (epoch + 1) * extent.steps - 1))
    for stretch in period.generation.stretches:
        cuts.update((stretch.start, stretch.end))
    for start, stop in pairwise(sorted(cut for cut in cuts if period.start <= cut <= end)):
        while waiting and waiting[-1].start <= start:
            shares.append(waiting.pop())
        shares = [share for share in shares if share.end > start]
        absent = reach.keys() - {share.rank for share in shares}
        holes = {rank for rank in absent if reach[rank] > start}
        substituted = _substituted(shares, absent - holes - period.generation.left)
        begin = start % extent.steps * extent.batch
        yield Segment(
            epoch=start // extent.steps,
            start=start,
            end=stop,
            begin=begin,
            length=min(extent.batch, extent.samples - begin),
            owed=stop <= times.done,
            shares=(*shares, *substituted),
            substituted=substituted,
            absent=tuple(sorted(absent - {share.rank for share in substituted})),
            holes=tuple(sorted(holes)),
        )


def _substituted(shares: Iterable[Stretch], ranks: Container[int]) -> tuple[Stretch, ...]:
    """Return the shares of some ranks by the lines of the others, if these agree."""
    with_cuts = {share.cuts: share for share in shares if share.cuts}
    if len(with_cuts) != 1:
        return ()
    ((cuts, share),) = with_cuts.items()
    return tuple(
        replace(share, rank=rank, first=first, last=last, cuts=(), skipped=0)
        for rank, (first, last) in enumerate(pairwise(cuts))
        if rank in ranks
    )
