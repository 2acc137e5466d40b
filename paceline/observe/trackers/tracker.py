"""Recorder that passes a run's values to an experiment tracker, from a thread of its own.

    event ──▶ values of a step ──▶ queue ──▶ thread ── every second ──▶ writer ──▶ files, server

`event` never blocks: a slow server delays no step. A writer that fails ends the tracking, never the
run: the user gets one note. The end waits a limited time for the last values.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from paceline.cluster.print_message import print_message
from paceline.errors import PacelineError
from paceline.recorder import NullRecorder

END_S = 10.0  # limit for the last values at the end of a run
_STOPPED_S = 1.0  # and where a signal or an error ends it
_INTERVAL_S = 1.0  # between writes, which take what has come until then together
_QUEUED = 20_000  # points, about 10 MB; more mean that the tracker doesn't answer

# Fields of the events, with the names that users see. The axis of all is the number of the step.
STEP_VALUES = {
    "epoch": "train/epoch",
    "learning_rate": "train/learning_rate",
    "exposed_ms": "step/exposed_ms",
    "sent": "step/sent_bytes",
}
EPOCH_VALUES = {
    "loss": "epoch/loss",
    "accuracy": "epoch/accuracy",
    "test_accuracy": "epoch/test_accuracy",
    "top5": "epoch/test_top5",
}


@dataclass(frozen=True)
class Point:
    """Values of one step, by name.

    Attributes:
        step: number of the step, from 0.
        time: when they were recorded, in seconds since 1970.
    """

    step: int
    values: Mapping[str, float]
    time: float = field(default_factory=time.time)


class Writer(Protocol):
    """Writer of one tracker; its methods are called from one thread and may block or raise."""

    place: str
    """Where the user finds the values: a folder or an address."""

    def write(self, points: Sequence[Point]) -> None:
        """Write values, in the order in which they were recorded."""

    def note(self, text: str, step: int) -> None:
        """Write a sentence for the user."""

    def go_back(self, step: int) -> None:
        """Void the values from `step` on, if the tracker can: the run repeats those steps."""

    def close(self, *, complete: bool) -> None:
        """Write out what is left; `complete`: the run came to its end."""


OpenWriter = Callable[[Path, Mapping[str, object]], Writer]
"""Opens a writer for a run: the run's folder, and its configuration by name."""

_Item = Point | Callable[[Writer], None] | None  # None is the end


class Tracker(NullRecorder):
    """Recorder that passes values to a tracker.

    Events, and the fields that it reads:
        step: step, samples, and those of `STEP_VALUES` that there are.
        loss: step, loss.
        epoch: those of `EPOCH_VALUES` that are not None.
        log: step, values (by name).
        note: text.
        restore: step (the first one that the run makes).
        finish: stopped (by a signal).

    Args:
        name: the tracker's name, for messages.
        open_writer: called in the thread, without arguments.
        clock: returns seconds since an arbitrary origin.
        end_s: limit of `close` in seconds, if the run came to its end.
    """

    def __init__(
        self,
        name: str,
        open_writer: Callable[[], Writer],
        *,
        clock: Callable[[], float] = time.monotonic,
        end_s: float = END_S,
    ) -> None:
        self._name = name
        self._open = open_writer
        self._clock = clock
        self._end_s = end_s
        self._step = 0  # the last one
        self._epoch = -1  # its epoch
        self._previous: float | None = None  # the end of the step before, within an epoch
        self._complete = self._failed = False
        self._queue: SimpleQueue[_Item] = SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def event(self, name: str, **fields: Any) -> None:
        """Queue what the tracker shows of an event."""
        match name:
            case "step" if "samples" in fields:  # without: a batch that another step trained too
                self._queue_step(fields)
            case "loss":
                self._put(Point(fields["step"], {"train/loss": fields["loss"]}))
            case "epoch":
                self._put(Point(self._step, _named(EPOCH_VALUES, fields)))
            case "log":
                self._put(Point(fields["step"], fields["values"]))
            case "note":
                text = str(fields["text"])
                step = self._step
                self._put(lambda writer: writer.note(text, step))
            case "restore":
                first = fields["step"]
                self._previous = None
                self._step = max(0, first - 1)
                self._put(lambda writer: writer.go_back(first))
            case "finish":
                self._complete = not fields["stopped"]

    def close(self) -> None:
        """Wait until everything is written, for a limited time."""
        self._queue.put(None)
        self._closing.set()
        limit = self._end_s if self._complete else _STOPPED_S
        self._thread.join(limit)
        if self._thread.is_alive():
            print_message(f"the last values for {self._name} weren't all sent within {limit:g} s.")

    def _queue_step(self, fields: Mapping[str, Any]) -> None:
        now = self._clock()
        values = _named(STEP_VALUES, fields)
        if fields["epoch"] != self._epoch:  # an evaluation may have come between
            self._previous = None
        if self._previous is not None and now > self._previous:
            seconds = now - self._previous
            values["step/time_ms"] = seconds * 1e3
            values["train/samples_per_second"] = fields["samples"] / seconds
        self._step = fields["step"]
        self._epoch = fields["epoch"]
        self._previous = now
        self._put(Point(self._step, values))

    def _put(self, item: _Item) -> None:
        if self._failed:
            return
        if self._queue.qsize() < _QUEUED:
            self._queue.put(item)
        else:
            self._fail("it doesn't answer")

    def _fail(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            print_message(f"{self._name} failed, and the run continues without it: {reason}.")

    def _run(self) -> None:
        try:
            writer = self._open()
            print_message(f"{self._name} shows this run in {writer.place}.")
            while self._write(writer):
                self._closing.wait(_INTERVAL_S)
            writer.close(complete=self._complete)
        except Exception as error:  # whatever the library and the network raise
            first, *_ = str(error).strip().splitlines() or [""]
            kind = "" if isinstance(error, PacelineError) else f"{type(error).__name__}: "
            self._fail(f"{kind}{first}".removesuffix(".").removesuffix(": "))

    def _write(self, writer: Writer) -> bool:
        """Write all that is queued, at least one item; return False at the end."""
        items = [self._queue.get() for _ in range(max(1, self._queue.qsize()))]
        for _, group in groupby(items, key=lambda item: isinstance(item, Point)):
            some = list(group)
            if points := [item for item in some if isinstance(item, Point)]:
                writer.write(points)
            for item in some:
                if item is None:
                    return False
                if not isinstance(item, Point):
                    item(writer)
        return not self._failed


def _named(names: Mapping[str, str], fields: Mapping[str, Any]) -> dict[str, float]:
    return {name: fields[key] for key, name in names.items() if fields.get(key) is not None}
