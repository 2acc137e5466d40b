"""What isn't exact, in words: lines that contradict each other, and batches that aren't tiled.

A fault names positions in an epoch's order, and ranks; its epoch and step are fields beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from paceline.observe.ledger.history import Stretch
from paceline.observe.ledger.periods import Period
from paceline.observe.ledger.reading import History
from paceline.observe.ledger.segments import Segment
from paceline.observe.ledger.tiling import Columns, Tiling

_NAMED = 8  # ranks


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
    if len(written.world_sizes) > 1:
        sizes = " and ".join(map(str, sorted(written.world_sizes)))
        yield f"Its ranks recorded different world sizes: {sizes}."
    if written.stretches and not written.world_sizes:
        yield "No line records its world size."
    if len(written.restores) > 1:
        steps = " and ".join(map(str, sorted(written.restores)))
        yield f"Its ranks recorded that they resumed at different steps: {steps}."
    if written.stretches and not written.restores:
        yield "No line records the step at which it resumed."
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
    missing = sorted(set(period.ranks) - history.ranks)
    if missing and written.stretches:
        yield (
            f"It has {len(period.ranks)} ranks, but no event file of {_ranks(missing)}: give the "
            "run's folder of each machine."
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
    for stray in strays:
        if stray.epoch != segment.epoch:
            yield f"Rank {stray.rank} recorded another epoch: {stray.epoch}, counted from 0."
        else:
            count = stray.last - stray.first
            yield f"Rank {stray.rank} recorded that it skipped {stray.skipped} of {count} samples."


def _positions(segment: Segment, columns: Columns) -> str:
    span = _span(segment.begin + columns[0], segment.begin + columns[1])
    return f"Positions {span} were" if " to " in span else f"Position {span} was"


def _span(first: int, end: int) -> str:
    return f"{first} to {end - 1}" if first < end - 1 else f"{first}"


def _ranks(ranks: Iterable[int]) -> str:
    """Name ranks: `rank 3`, `ranks 0, 1`, the first few of many."""
    named = list(dict.fromkeys(ranks))
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    return f"rank{'s' * (len(named) > 1)} {', '.join(map(str, named[:_NAMED]))}{more}"
