"""The last known state of a run that no process reports: from the ends of its event files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.observe.cost.cost import Cost
from paceline.observe.event_file import find_event_files

_TAIL_BYTES = 65536


@dataclass(frozen=True, kw_only=True)
class LastState:
    """Last known state of a run.

    Attributes:
        generation: the number of its newest generation; None: it has none.
        steps: the number of steps that a member completed in it, or from which it continued.
        checkpoint: the number of steps in the newest checkpoint; None: none is named.
        ended: whether a member recorded the end of the run.
        best: the best test accuracy of all epochs, if it ended and had test data.
        best_epoch: the number of the epoch that has it.
        weights: paths of the files of weights, if it ended.
        cost: what it cost, as far as it was counted; None: it wasn't.
        reason: why it ended before its last epoch, a clause; "": it didn't.
    """

    generation: int | None = None
    steps: int = 0
    checkpoint: int | None = None
    ended: bool = False
    best: float | None = None
    best_epoch: int | None = None
    weights: tuple[str, ...] = ()
    reason: str = ""
    cost: Cost | None = None


def best_sentence(best: float | None, epoch: int | None) -> str:
    """Return the best test accuracy of a run in words; "" where there is none.

    Args:
        best: the accuracy.
        epoch: the number of its epoch.
    """
    if best is None or epoch is None:
        return ""
    return f"best test accuracy {best:.2%} after epoch {epoch + 1}"


def last_state(run: Path) -> LastState:
    """Read the ends of a run's event files.

    Raises:
        OSError: one can't be read.
    """
    state = of_events(event for _, path in find_event_files(run) for event in _tail(path))
    # A folder may be renamed, moved or copied, and its path be relative to another folder.
    here = tuple(str(run / Path(weights).name) for weights in state.weights)
    return replace(state, weights=here if all(map(os.path.exists, here)) else state.weights)


def of_events(events: Iterable[Mapping[str, Any]]) -> LastState:
    """Return the state that the last events of all members show."""
    generation: int | None = None
    steps = 0
    checkpoint = None
    ended = False
    result: Mapping[str, Any] = {}
    cost: Cost | None = None
    for event in events:
        kind = event.get("event")
        number = event.get("generation")
        if not isinstance(number, int):
            continue
        if generation is None or number > generation:
            generation = number
            steps = 0
            ended = False
            result = {}
        if kind == "cost":
            counted = Cost.of_event(event)
            if cost is None or cost.processor_hours <= counted.processor_hours:
                cost = counted
        if kind == "checkpoint":
            checkpoint = max(checkpoint or 0, event["step"])
        if number == generation:
            # A step's number is one less than the steps that
            # it completes; a restore names them as they are.
            if kind in ("step", "restore"):
                steps = max(steps, event["step"] + (kind == "step"))
            if kind == "end":
                ended = True
                result = event
    return LastState(
        generation=generation,
        steps=steps,
        checkpoint=checkpoint,
        ended=ended,
        best=result.get("best"),
        best_epoch=result.get("best_epoch"),
        weights=tuple(result.get("weights", ())),
        reason=result.get("reason", ""),
        cost=cost,
    )


def _tail(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the last events of a file, without the torn lines at both ends."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        lines = file.read().split(b"\n")
    # The first piece began before the tail; the last one
    # is empty, or a line that is still being written.
    for line in lines[size > _TAIL_BYTES : -1]:
        with suppress(ValueError):  # damaged: `paceline ledger` names it
            event = json.loads(line)
            if isinstance(event, dict):
                yield event
