"""Traces a few steps of all ranks on one clock, into a file of the run's folder.

    step   first … last   last + 1        the spans of these steps; what they have put arrives
                              └ all ranks: compare clocks, send their buffers to rank 0

A step's puts have all arrived before any rank ends the next step, which reads their sums.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from paceline.atomic_write import explained_writes, write_atomically
from paceline.comm.communicator import Communicator, gather_bytes
from paceline.errors import Message
from paceline.recorder import NullRecorder
from paceline.timeline.chrome_trace import chrome_trace
from paceline.timeline.clock_offsets import offsets, rounds, running_system
from paceline.timeline.recorder_buffer import RecorderBuffer
from paceline.timeline.timeline import Timeline

MARKS = 2**16  # moments of puts that a window remembers


class Groups(Protocol):
    """Protocol of a generation's context, as far as a trace needs it."""

    def group(self, axis: str, purpose: str) -> Communicator:
        """Return what connects the ranks along an axis for a purpose."""


class Printer(Protocol):
    """Protocol of what prints sentences for the user."""

    def print(self, note: str | Message) -> None:
        """Print one."""


class InGeneration(Protocol):
    """Protocol of a `Run`, as far as a trace needs it."""

    @property
    def context(self) -> Groups:
        """The present generation's context."""

    @property
    def timeline(self) -> Timeline:
        """This rank's timeline."""

    @property
    def notes(self) -> Printer:
        """What prints where the trace is, on rank 0, or why there is none."""


class Trace(NullRecorder):
    """Recorder that lets the timeline retain some steps' spans, and writes them after the last.

    Args:
        path: the file.
        steps: the steps to trace, counted from the run's first step (0).
        run: has the timeline, and the present generation, whose ranks all trace the same steps.
        machine: the number of this rank's machine.
    """

    def __init__(
        self,
        path: Path,
        steps: range,
        run: InGeneration,
        machine: int,
    ) -> None:
        self.path = path
        self._steps = steps
        self._machine = machine
        self._run = run
        self._written = False
        self._names: dict[int, list[str]] = {}
        self._buckets: list[tuple[str, ...]] = []
        run.timeline.retain(steps)

    def event(self, name: str, **fields: Any) -> None:
        """Note what buckets hold and notifications announce, and the end of a step or the run.

        Raises:
            CommError: a peer was lost, or silent, when the trace was written.
            PacelineError: it can't be written.
        """
        if name == "notifications":
            self._names[max(self._run.timeline.windows, default=0)] = fields["texts"]
        elif name == "buckets":
            self._buckets = fields["parameters"]
        elif name == "step" and fields["step"] > self._steps[-1]:
            self._write()
        elif name == "finish":
            self._write()
            if not self._written and self._ranks.rank == 0:
                steps = f"{self._steps[0]}:{self._steps[-1]}"
                self._run.notes.print(
                    Message(
                        "{--trace_steps} {}: none of these steps was run, so there is no trace.",
                        steps,
                    )
                )

    @property
    def _ranks(self) -> Communicator:
        return self._run.context.group("all", "steps")

    def _write(self) -> None:
        """Write the trace, once, if there is one; collective."""
        timeline = self._run.timeline
        spans = timeline.spans(self._steps)
        if self._written or not spans:
            return
        timeline.retain(range(0))
        self._written = True
        communicator = self._ranks
        made = rounds(communicator, timeline.clock)
        buffer = RecorderBuffer(
            rank=communicator.rank,
            machine=self._machine,
            system=running_system(),
            spans=spans,
            moments=timeline.puts(),
            names=self._names,
            buckets=self._buckets,
        )
        data = gather_bytes(communicator, buffer.to_bytes(), "the trace")
        if communicator.rank == 0:
            buffers = [RecorderBuffer.from_bytes(part) for part in data]
            apart = offsets(made, [buffer.system for buffer in buffers])
            with explained_writes(self.path):
                write_atomically(self.path, json.dumps(chrome_trace(buffers, apart)))
            self._run.notes.print(f"the trace is in {self.path}.")
