"""`Run`: the handle through which what outlives a generation finds the present one."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.comm.communicator import Communicator
from paceline.observe.trace.step_trace import Trace
from paceline.recorder import NullRecorder, Recorder
from paceline.run.generation_context import GenerationContext


@dataclass(kw_only=True)
class Run:
    """Run: the present generation's context, and the recorders of the run.

    Objects that outlive a generation keep the run, and ask its context at each use. They keep no
    rank, world size or communicator.

    Attributes:
        context: the present generation's context.
        recorder: receives spans, counts and events.
        trace: recorder of the trace; None if the run is not traced.
    """

    context: GenerationContext
    recorder: Recorder = field(default_factory=NullRecorder)
    trace: Trace | None = None

    def rank_and_size(self) -> tuple[int, int]:
        """Return this process's present rank, and the world size."""
        return self.context.group.rank, self.context.group.size

    def layers(self) -> Communicator:
        """Return what connects layers that exchange within forward and backward."""
        assert self.context.layers is not None
        return self.context.layers
