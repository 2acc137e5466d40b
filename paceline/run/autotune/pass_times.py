"""Times of a model's passes in a few steps: when each parameter is read, and its gradient complete.

Hooks on the modules that read parameters, and on the gradients, take the times. A step waits for
exchanges: in the forward before a layer, or in `reduce()`. The time of these waits is left out, so
that what remains is the computation. What a step does outside of forward and backward (loading
data, the optimizer's own step) counts as the beginning of its forward: exchanges continue
meanwhile.

    step     │ data │ forward: wait, layer, wait, layer, … │ loss, backward │ optimizer.step() │
    forward  └ moved here, without the waits ──────────────┘                └───── moved ──────┘

An update that runs in the forward is a part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median

from torch import Tensor, nn

from paceline.replica.live_hooks import LiveHook
from paceline.replica.model_list import roots_of
from paceline.replica.read_tracing import ReadMap
from paceline.run.autotune.step_schedule import Parameter, Profile
from paceline.timeline.timeline import Timeline


@dataclass(kw_only=True)
class _Step:
    """Times of the step under way, in seconds without waits since the clock's origin.

    Attributes:
        begun: when the step began.
        forward: when its first forward began; None: it hasn't.
        forward_end: when its last forward ended.
        read_at: for each parameter, when it was first read.
        ready_at: for each parameter, when its gradient was last completed.
    """

    begun: float
    forward: float | None = None
    forward_end: float = 0.0
    read_at: dict[Tensor, float] = field(default_factory=dict)
    ready_at: dict[Tensor, float] = field(default_factory=dict)


class PassTimes:
    """Times of a model's passes, from the first `begin_step` to `close`.

    Args:
        model: the model; none of its modules is compiled.
        reads: which modules read which parameters.
        parameters: those that are trained.
        tables: those of them whose gradients may be zero but for some rows.
        timeline: has the time, without the rank's waits for its peers.

    Attributes:
        nonzero: for each table, the share of its rows that weren't zero in its first gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        reads: ReadMap,
        parameters: Sequence[nn.Parameter],
        tables: frozenset[nn.Parameter],
        timeline: Timeline,
    ) -> None:
        self._tables = tables
        self._timeline = timeline
        self.nonzero: dict[Tensor, float] = {}
        self._accumulates = reads.accumulates
        self._outside = reads.outside
        self._parameters = tuple(parameters)
        self._step: _Step | None = None
        self._reduces = False
        self._steps: list[list[float]] = []  # of each: forward, backward, reads, completions
        self._undo = ExitStack()
        for module, own in reads.readers.items():
            self._before(module, LiveHook(self._read, own))
        for root in roots_of(model):
            self._before(root, LiveHook(self._begin_forward))  # before `_read`
            end = root.register_forward_hook(LiveHook(self._end_forward))
            self._undo.callback(end.remove)
        for p in parameters:
            ready = p.register_post_accumulate_grad_hook(LiveHook(self._ready))
            self._undo.callback(ready.remove)

    def begin_step(self, *, reduced: bool = False) -> None:
        """End the step before, if there is one, and begin one.

        Args:
            reduced: in the step before, the sums of gradients were awaited before the update.
        """
        now = self._timeline.own_seconds()
        if self._step is not None:
            self._reduces |= reduced
            self._end_step(self._step, now)
        self._step = _Step(begun=now)

    def profile(self) -> Profile | None:
        """Return the medians over the ended steps; None if none of them had both passes."""
        if not self._steps:
            return None
        forward, backward, *rest = (median(column) for column in zip(*self._steps, strict=True))
        count = len(self._parameters)
        parameters = (
            Parameter(nbytes=p.nbytes, ready=ready, read=read)
            for p, read, ready in zip(self._parameters, rest[:count], rest[count:], strict=True)
        )
        return Profile(
            forward=forward,
            backward=backward,
            update=0.0,
            parameters=tuple(parameters),
            reduces=self._reduces,
        )

    def close(self) -> None:
        """Remove the hooks."""
        self._step = None
        self._undo.close()

    def _before(self, module: nn.Module, hook: Callable[..., None]) -> None:
        """Call a hook before all others, which may wait, when a module is called."""
        self._undo.callback(module.register_forward_pre_hook(hook, prepend=True).remove)

    def _begin_forward(self, *_: object) -> None:
        if self._step is not None and self._step.forward is None:
            self._step.forward = self._timeline.own_seconds()

    def _read(self, own: Sequence[nn.Parameter], *_: object) -> None:
        if self._step is None:
            return
        now = self._timeline.own_seconds()
        for p in own:
            self._step.read_at.setdefault(p, now)

    def _end_forward(self, *_: object) -> None:
        if self._step is not None:
            self._step.forward_end = self._timeline.own_seconds()

    def _ready(self, parameter: Tensor) -> None:
        if self._step is None:
            return
        self._step.ready_at[parameter] = self._timeline.own_seconds()
        if parameter in self._tables and parameter not in self.nonzero:
            assert parameter.grad is not None
            self.nonzero[parameter] = parameter.grad.any(1).float().mean().item()

    def _end_step(self, step: _Step, now: float) -> None:
        if step.forward is None or not step.ready_at:
            return
        backward = max(step.ready_at.values()) - step.forward_end
        if backward < 0:  # a forward after the last backward
            return
        forward = now - step.begun - backward
        outside = max(0.0, forward - (step.forward_end - step.forward))
        reads = [self._read_time(p, step, outside, forward) for p in self._parameters]
        completions = [self._completion(p, step, backward) for p in self._parameters]
        self._steps.append([forward, backward, *reads, *completions])

    def _read_time(
        self, parameter: nn.Parameter, step: _Step, outside: float, forward: float
    ) -> float:
        if parameter in self._outside:  # read as soon as the step ends
            return 0.0
        at = step.read_at.get(parameter)
        if at is None or step.forward is None:
            return forward
        return min(max(0.0, outside + at - step.forward), forward)

    def _completion(self, parameter: nn.Parameter, step: _Step, backward: float) -> float:
        at = step.ready_at.get(parameter)
        if self._accumulates or at is None:
            return backward
        return max(0.0, at - step.forward_end)
