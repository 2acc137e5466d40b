"""Picture of a pipeline's spans in text: a row a stage, time to the right, idle time as dots.

    F0 F1 ......... B0    B1    F2 ...
    ...F0 B0    F1 B1    ...

F is a forward pass, B a backward one, I and W its halves for inputs and for weights; the number is
the microbatch's. Where a span has no room for its number, its letter stands alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.parallel.schedule_times import Span, step_seconds
from paceline.parallel.schedules import Pass

LETTERS: dict[Pass, str] = {
    "forward": "F",
    "backward": "B",
    "backward_input": "I",
    "backward_weight": "W",
}


def column_seconds(spans: Sequence[Span], width: int) -> float:
    """Return how much time a column shows, so that rows have at most `width` columns.

    Spans as long as the shortest get the same whole number of columns each, if there is room.
    """
    whole = step_seconds(spans)
    shortest = min(span.end - span.start for span in spans)
    wanted = max(len(label(span)) for span in spans) + 1
    columns = min(wanted, int(width * shortest / whole + 1e-9))  # a row may be exactly full
    return shortest / columns if columns else whole / width


def draw(spans: Sequence[Span], column: float) -> list[str]:
    """Draw a row a stage of a step's spans, simulated or measured; a column is so many seconds."""
    begin = min(span.start for span in spans)
    stages = sorted({span.stage for span in spans})
    rows = {stage: ["."] * round(step_seconds(spans) / column) for stage in stages}
    for span in spans:
        first = round((span.start - begin) / column)
        room = round((span.end - begin) / column) - first
        text = label(span)
        shown = text if len(text) <= room else text[:1]
        rows[span.stage][first : first + room] = shown.ljust(room)[:room]
    return ["".join(row).rstrip() for row in rows.values()]


def label(span: Span) -> str:
    """Return a span's text: "F0"."""
    return f"{LETTERS[span.task.kind]}{span.task.microbatch}"
