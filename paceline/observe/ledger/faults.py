"""What isn't exact, in words: lines that contradict each other, and batches that aren't tiled.

A fault names positions in an epoch's order, and ranks; its epoch and step are fields beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from paceline.observe.ledger.history import Stretch
from paceline.observe.ledger.periods import Period
from paceline.observe.ledger.reading import History
from paceline.observe.ledger.segments import Segment
from paceline.observe.ledger.tiling import Columns, Tiling

_NAMED = 8  # ranks or members
_ALL_FOLDERS = "give the run's folder of each machine"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Finding of the ledger: a deviation from exactly-once training.

    Attributes:
        text: a sentence that says what is wrong, but not where.
        generation: the number of the generation that it concerns.
        step: the first step that it concerns, counted from the run's first; None if it concerns no
            particular step.
        steps: the number of steps that it concerns.
    """

    text: str
    generation: int
    step: int | None = None
    steps: int = 0


def contradictions(history: History, period: Period) -> Iterator[str]:
    """Yield the contradictions in the lines of a generation that counts."""
    written = period.generation
    if len(sizes := {len(members) for members in written.members}) > 1:
        yield f"Its ranks recorded different world sizes: {' and '.join(map(str, sorted(sizes)))}."
    elif len(written.members) > 1:
        yield "Its ranks recorded different members."
    if written.stretches and not written.members:
        yield "No line records its world size."
    if not (written.members or written.stretches) and written.key and period.start < period.end:
        yield (
            f"No event file of generation {written.key}, which started after {period.start:,} "
            f"steps, was given: {_ALL_FOLDERS}."
        )
    if len(written.headers) > 1:
        yield "Its ranks recorded different starts or ancestors."
    if len(written.restores) > 1:
        steps = " and ".join(map(str, sorted(written.restores)))
        yield f"Its ranks recorded that they resumed at different steps: {steps}."
    if written.stretches and not written.restores:
        yield "No line records the step at which it resumed."
    declared = min((lineage[-1].start for lineage in written.headers), default=None)
    if declared is not None and any(step > declared for step in written.restores):
        yield (
            f"It started after {declared:,} steps, but its ranks recorded that they resumed at "
            f"step {max(written.restores)}."
        )
    if any(not 0 <= step <= history.extent.total for step in written.restores):
        yield (
            f"It resumed at step {max(written.restores)}, but the run has "
            f"{history.extent.total} steps."
        )
    for stretch in written.stretches:
        if stretch.start < period.start or stretch.end > history.extent.total:
            yield (
                f"Rank {stretch.rank} recorded step {_span(stretch.start, stretch.end)}, but this "
                f"generation could only train step {_span(period.start, history.extent.total)}."
            )
    missing = _missing(history, period)
    if missing and written.stretches and not written.has_all_shares:
        names = _names(missing.values())
        yield f"It has {len(period.members)} ranks, but no event file of {names}: {_ALL_FOLDERS}."


def substitutions(
    history: History, period: Period, substituted: Mapping[int, int]
) -> Iterator[str]:
    """Yield which members' lines are missing in a generation, where other members' lines have all.

    Args:
        history: the run's.
        period: the generation's.
        substituted: for each rank, the number of its samples that only other members' lines prove.
    """
    missing = _missing(history, period) if period.generation.has_all_shares else {}
    ended = {rank: period.members[rank] for rank in substituted if rank not in missing}
    kinds = (("event file", missing, f"; {_ALL_FOLDERS}"), ("last lines", ended, ""))
    for what, members, remedy in kinds:
        if members:
            samples = sum(substituted.get(rank, 0) for rank in members)
            yield (
                f"Generation {period.number} has no {what} of {_names(members.values())}: other "
                f"members' lines prove {samples:,} samples, skipped ones included{remedy}."
            )


def misplaced(segment: Segment, tiling: Tiling, strays: Iterable[Stretch]) -> Iterator[str]:
    """Yield what isn't right in a segment.

    Args:
        segment: the steps.
        tiling: of its batch by those shares that fit.
        strays: those that don't.
    """
    if segment.owed:
        for columns in tiling.lost:
            silent = f" ({_ranks(segment.absent)} wrote no line)" if segment.absent else ""
            yield f"{_positions(segment, columns)} trained by no rank{silent}."
    elif segment.holes:
        yield (
            f"{_ranks(segment.holes).capitalize()} wrote no line for these steps, but lines for "
            "later ones."
        )
    for columns in tiling.twice:
        if columns[0] < 0 or columns[1] > segment.length:
            batch = _span(segment.begin, segment.begin + segment.length)
            where = f"outside of the batch, {batch}"
        else:
            where = "twice"
        owners = [s.rank for s in segment.shares if s.first < columns[1] and s.last > columns[0]]
        yield f"{_positions(segment, columns)} trained {where}, by {_ranks(owners)}."
    yield from _disagreements(segment)
    for stray in strays:
        if stray.epoch != segment.epoch:
            yield f"Rank {stray.rank} recorded another epoch: {stray.epoch}, counted from 0."
        else:
            count = stray.last - stray.first
            yield f"Rank {stray.rank} recorded that it skipped {stray.skipped} of {count} samples."


def _disagreements(segment: Segment) -> Iterator[str]:
    """Yield the first share that differs between two lines."""
    written = {share.cuts: share.member for share in segment.shares if share.cuts}
    known = {share.rank: (share.member, (share.first, share.last)) for share in segment.shares}
    for cuts, member in written.items():
        for rank, columns in enumerate(pairwise(cuts)):
            other, expected = known.setdefault(rank, (member, columns))
            if columns != expected:
                yield (
                    f"The share of rank {rank} is {_range(segment, expected)} in the file of "
                    f"{other}, but {_range(segment, columns)} in the file of {member}."
                )
                return


def _missing(history: History, period: Period) -> dict[int, str]:
    """Return the members of a generation that have no event file, by rank."""
    members = enumerate(period.members)
    return {rank: member for rank, member in members if member not in history.members}


def _range(segment: Segment, columns: Columns) -> str:
    return f"[{segment.begin + columns[0]}, {segment.begin + columns[1]})"


def _positions(segment: Segment, columns: Columns) -> str:
    span = _span(segment.begin + columns[0], segment.begin + columns[1])
    return f"Positions {span} were" if " to " in span else f"Position {span} was"


def _span(first: int, end: int) -> str:
    return f"{first} to {end - 1}" if first < end - 1 else f"{first}"


def _ranks(ranks: Iterable[int]) -> str:
    """Name ranks: `rank 3`, `ranks 0, 1`, the first few of many."""
    named = dict.fromkeys(ranks)
    return f"rank{'s' * (len(named) > 1)} {_names(named)}"


def _names(names: Iterable[object]) -> str:
    """Name the first few of many."""
    named = list(map(str, names))
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    return ", ".join(named[:_NAMED]) + more
