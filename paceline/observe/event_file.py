"""The event file of a rank: one JSON object per line, with the fields of the table `FIELDS`.

`events.rank<r>.jsonl` is appended to, a line a step, and proves which part of the data order was
trained in which step of which generation. A line is handed to the system whole and at once: a
killed process loses none. A machine that loses power can tear the last line, and it only; readers
ignore a torn last line and the next writer removes it.

    run         a start of the run, generation g, by each of its ranks
    restore     generation g resumes before step s: lines of earlier generations from s on are void
    step        this rank trained positions [first, last) of the epoch's order; what it took
    buckets     the parameters of each bucket, as they are exchanged from here on
    loss        the global batch's mean loss, by rank 0
    checkpoint  published: it holds all steps below s
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.errors import DataError
from paceline.observe.line_file import LineFile

# The fields that are written, () for all; others, such as a loss that is still being computed, are
# for other recorders.
FIELDS = {
    "run": (
        *("generation", "rank", "world_size", "machines", "samples", "steps", "epochs", "batch"),
        *("model", "device"),
    ),
    "restore": ("generation", "step", "origin"),
    "step": ("generation", "step", "epoch", "first", "last", "skipped"),
    "loss": ("generation", "step", "loss"),
    "checkpoint": ("generation", "step", "path"),
    "epoch": (),
    "note": ("text",),
    "buckets": ("parameters",),
    "end": ("generation",),
}
# Times and bytes of a step, where they were measured; `buckets` names what it waited for.
_IF_MEASURED = (
    *("compute_ms", "exposed_ms", "send_ms", "update_ms", "waits_ms", "sent", "received"),
)


class EventFile(LineFile):
    """Recorder that appends a rank's events to its file, as JSON lines.

    Args:
        folder: the run's folder, which exists.
        rank: the rank whose events are written.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        path = folder / f"events.rank{rank}.jsonl"
        if path.exists():
            with path.open("r+b") as file:  # appended to, a torn last line would damage the next
                file.truncate(file.read().rfind(b"\n") + 1)
        super().__init__(path)

    def event(self, name: str, **fields: Any) -> None:
        """Write a line, if events of that name are recorded.

        Raises:
            KeyError: a field to be written is missing.
            TypeError: a field to be written isn't JSON's.
        """
        if name in FIELDS:
            measured = (key for key in _IF_MEASURED if key in fields) if name == "step" else ()
            names = (*FIELDS[name], *measured) or fields
            values = {key: _json(fields[key]) for key in names}
            self.write(json.dumps({"event": name, **values}, allow_nan=False))


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Read an event file line by line, without a torn last line.

    Raises:
        DataError: a line is not an event, or the file can't be read; names the file and the line.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    yield _parse(line, f"{path}, line {number}")
    except OSError as error:
        raise DataError(
            f"{path} can't be read ({error.strerror}); run this as the user that ran the training."
        ) from error


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError as error:
        raise DataError(
            f"{where}: not an event ({error}); the file is damaged, restore it from a copy."
        ) from error
    if not isinstance(event, dict):
        raise DataError(
            f"{where}: not an event but {type(event).__name__}; this is not an event file of a run."
        )
    return event


def _json(value: Any) -> Any:
    """JSON knows no infinity and no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
