"""The event file of a member: one JSON object per line, with the fields of the table `FIELDS`.

`events.<member id>.jsonl` is appended to, a line a step, and proves which part of the data order
was trained in which step of which generation. The id is a process's for life: a restarted process
is another member and writes another file, so that no file has two writers and a rank may pass to
another member. A line is handed to the system whole and at once: a killed process loses none. A
machine that loses power can lose a file's last lines and tear one; readers ignore a torn last line.
Earlier versions named the files `events.rank<r>.jsonl`, to which each start of the run appended.

    run         a start of generation g, by each of its ranks; its members in rank order, its id,
                the number of completed steps from which it starts, and all its ancestors as
                [id, start]. A rank is a replica's number, where several processes have one; of
                those, all but the first write counts false. The lines that follow are of this
                generation. Where an optimizer's step trains several batches, each counts as a step,
                and a start names the last one of them; `restore` has the number of completed steps
    restore     generation g resumes before step s: its ancestors' lines from step s on are void
    recovery    generation g is entered: what that took, in seconds (`change_account.py`), and when
                this member detected the loss, by the machine's monotonic clock
    replay      generation g has trained again what the loss undid: step s, which was lost, begins
    step        this rank trained positions [first, last) of the epoch's order; what it took. Rank r
                has positions [cuts[r], cuts[r + 1]) of it, as the data order divides the batch
    buckets     the parameters of each bucket, as they are exchanged from here on
    loss        the global batch's mean loss, by rank 0
    speeds      the ranks' times a sample, in ms, of step s; the slowest rank, if it is 10% slower
                than another; the ranks' samples of a full batch from step `first` on
    checkpoint  published: it holds all steps below s
    predicted   autotuning's predictions: ms a step with each exchange, and which continues
    change      generation g follows, without the lost members; why each was lost ("" if this member
                has no evidence of it), the step from which it continues, and the seconds from the
                detection to the decision
    cost        what the run cost up to here, on all machines and in all its starts
    merge       with --sync average, before step s: a fragment's weights, as they were taken after
                another step, are merged
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.cluster.membership.protocol import Membership
from paceline.errors import DataError
from paceline.observe.line_file import LineFile
from paceline.recorder import is_result

# The fields that are written, () for all; others, such as a loss that is still being computed, are
# for other recorders.
FIELDS = {
    "run": (
        *("generation", "rank", "world_size", "members", "machines", "samples", "steps", "epochs"),
        *("batch", "model", "device", "id", "start", "ancestors"),
    ),
    "restore": ("generation", "step", "origin"),
    "recovery": (
        *("generation", "detected_at", "interrupt", "decide", "restore", "form"),
        *("steps", "interval"),
    ),
    "replay": ("generation", "step", "steps", "resume", "replay"),
    "step": ("generation", "step", "epoch", "first", "last", "cuts", "skipped"),
    "loss": ("generation", "step", "loss"),
    "speeds": ("generation", "step", "milliseconds", "slowest", "first", "shares"),
    "checkpoint": ("generation", "step", "path"),
    "epoch": (),
    "note": ("text",),
    "buckets": ("parameters",),
    "predicted": ("exchange", "milliseconds"),
    "change": ("generation", "members", "lost", "causes", "start", "seconds"),
    "merge": ("step", "fragment", "taken_after"),
    "cost": (
        *("generation", "processor_hours", "gpu_hours", "machine_hours"),
        *("processor_kwh", "gpu_kwh", "price"),
    ),
    "end": (),
}
# Times and bytes of a step, where they were measured; `buckets` names what it waited for.
_IF_MEASURED = (
    *("compute_ms", "exposed_ms", "send_ms", "update_ms", "snapshot_ms", "check_ms", "waits_ms"),
    *("sent", "received", "boundary_ms", "wait_input_ms", "staleness"),
)
_IF_GIVEN = {"step": _IF_MEASURED, "run": ("drawn", "counts")}
_NAME = re.compile(r"events\.(?:rank(?P<rank>\d+)|(?P<id>.+-(?P<number>\d+)))\.jsonl")


class EventFile(LineFile):
    """Recorder that appends a member's events to its file, as JSON lines.

    Args:
        folder: the run's folder, which exists.
        member: the id of the member whose events are written.
        membership: says, for each result, whether this process is in the world; None: it is.
    """

    def __init__(self, folder: Path, member: str, membership: Membership | None = None) -> None:
        super().__init__(folder / f"events.{member}.jsonl")
        self._membership = membership

    def event(self, name: str, **fields: Any) -> None:
        """Write a line, if events of that name are recorded.

        Raises:
            KeyError: a field to be written is missing.
            TypeError: a field to be written isn't JSON's.
            PeerLost: a result isn't written, because this process may be outside the world.
        """
        if name in FIELDS:
            optional = (key for key in _IF_GIVEN.get(name, ()) if key in fields)
            names = (*FIELDS[name], *optional) or fields
            values = {key: _json(fields[key]) for key in names}
            line = json.dumps({"event": name, **values}, allow_nan=False)
            self.write(line, self._membership if is_result(name, fields) else None)


def find_event_files(*folders: Path) -> list[tuple[str, Path]]:
    """List the event files in a run's folders, each with its member's name.

    The name is `member <id>`, or `rank <r>` in a run of an earlier version. The files of the first
    ranks come first: in a run that is active, rank 0's lines say what is committed, which the
    others wrote before.
    """
    found = []
    for path in (path for folder in folders for path in folder.glob("events.*.jsonl")):
        if match := _NAME.fullmatch(path.name):
            rank, member, number = match.groups()
            found.append(
                (int(rank or number), f"member {member}" if member else f"rank {rank}", path)
            )
    return [(member, path) for _, member, path in sorted(found)]


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
