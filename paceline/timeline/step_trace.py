"""Traces a few steps of all ranks on one clock, into a file of the run's folder.

    step   first … last   last + 1        the spans of these steps; what they have put arrives
                              └ all ranks: compare clocks, send their buffers to rank 0

A step's puts have all arrived before any rank ends the next step, which reads their sums.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, Protocol

from paceline.atomic_write import explained_writes, write_atomically
from paceline.comm.communicator import Communicator, gather_bytes
from paceline.comm.window import PutEvent
from paceline.errors import Message
from paceline.recorder import NullRecorder
from paceline.timeline.chrome_trace import chrome_trace
from paceline.timeline.clock_offsets import offsets, rounds, running_system
from paceline.timeline.recorder_buffer import RecorderBuffer, Span, TracedPut

MARKS = 2**16  # moments of puts that a window remembers
_NOTHING = nullcontext()


class Groups(Protocol):
    """Protocol of a generation's context, as far as a trace needs it."""

    def group(self, axis: str, purpose: str) -> Communicator:
        """Return what connects the ranks along an axis for a purpose."""


class InGeneration(Protocol):
    """Protocol of a `Run`, as far as a trace needs it."""

    @property
    def context(self) -> Groups:
        """The present generation's context."""


class Trace(NullRecorder):
    """Recorder that buffers the spans of some steps, and writes the trace after the last of them.

    Args:
        path: path of the trace file.
        steps: the steps to trace, counted from the run's first step (0).
        run: has the present generation, whose ranks all trace the same steps.
        machine: the number of this rank's machine.
        clock: returns nanoseconds of the system's monotonic clock.
        report: called on rank 0 with a sentence that says where the trace is, or why there is none.

    Attributes:
        resources: resources that `close` releases.
    """

    def __init__(
        self,
        path: Path,
        steps: range,
        run: InGeneration,
        machine: int,
        clock: Callable[[], int] = time.monotonic_ns,
        report: Callable[[str | Message], None] = lambda text: None,
    ) -> None:
        self.path = path
        self.resources = ExitStack()
        self._steps = steps
        self._machine = machine
        self._run = run
        self._clock = clock
        self._report = report
        self._on = self._written = False
        self._spans: list[Span] = []
        self._windows: dict[int, Callable[[], Iterable[PutEvent]]] = {}
        self._names: dict[int, list[str]] = {}
        self._buckets: list[tuple[str, ...]] = []

    def follow(self, window: int, moments: Callable[[], Iterable[PutEvent]]) -> None:
        """Ask a window, in the end, for the moments of its puts."""
        self._windows[window] = moments

    def span(self, name: str, **fields: object) -> AbstractContextManager[None]:
        """Keep the block, in a traced step."""
        if name == "step":
            self._on = fields["step"] in self._steps
        return _TracedSpan(self, name, fields) if self._on else _NOTHING

    def event(self, name: str, **fields: Any) -> None:
        """Note what buckets hold and notifications announce, and the end of a step or the run.

        Raises:
            CommError: a peer was lost, or silent, when the trace was written.
            PacelineError: it can't be written.
        """
        if name == "notifications":
            self._names[max(self._windows)] = fields["texts"]
        elif name == "buckets":
            self._buckets = fields["parameters"]
        elif name == "step" and fields["step"] >= self._steps[-1]:
            self._on = False
            if fields["step"] > self._steps[-1]:
                self._write()
        elif name == "finish":
            self._write()
            if not self._written and self._ranks.rank == 0:
                steps = f"{self._steps[0]}:{self._steps[-1]}"
                self._report(
                    Message(
                        "{--trace_steps} {}: none of these steps was run, so there is no trace.",
                        steps,
                    )
                )

    @property
    def _ranks(self) -> Communicator:
        return self._run.context.group("all", "steps")

    def close(self) -> None:
        """Release the resources."""
        self.resources.close()

    def _write(self) -> None:
        """Write the trace, once, if there is one; collective."""
        if self._written or not self._spans:
            return
        self._on = False
        self._written = True
        communicator = self._ranks
        made = rounds(communicator, self._clock)
        buffer = RecorderBuffer(
            rank=communicator.rank,
            machine=self._machine,
            system=running_system(),
            spans=list(self._spans),
            moments=[
                TracedPut(number, *moment)
                for number, window in self._windows.items()
                for moment in window()
            ],
            names=self._names,
            buckets=self._buckets,
        )
        data = gather_bytes(communicator, buffer.to_bytes(), "the trace")
        if communicator.rank == 0:
            buffers = [RecorderBuffer.from_bytes(part) for part in data]
            apart = offsets(made, [buffer.system for buffer in buffers])
            with explained_writes(self.path):
                write_atomically(self.path, json.dumps(chrome_trace(buffers, apart)))
            self._report(f"the trace is in {self.path}.")
        self._spans.clear()


class _TracedSpan:
    """Context manager that records its block as a span of the trace."""

    __slots__ = ("_fields", "_name", "_start", "_trace")

    def __init__(self, trace: Trace, name: str, fields: dict[str, object]) -> None:
        self._trace = trace
        self._name = name
        self._fields = fields

    def __enter__(self) -> None:
        self._start = self._trace._clock()

    def __exit__(self, *_: object) -> None:
        thread = threading.current_thread().name
        now = self._trace._clock()
        self._trace._spans.append(Span(self._name, thread, self._start, now, self._fields))
