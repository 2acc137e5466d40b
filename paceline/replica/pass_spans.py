"""Spans `forward` and `backward` of a traced run, measured by hooks on the model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paceline.replica.compiled_modules import around_call, is_compiled
from paceline.replica.live_hooks import LiveHook
from paceline.timeline.timeline import Timeline


def watch_passes(model: nn.Module, timeline: Timeline) -> Callable[[], None]:
    """Measure spans `forward` and `backward` until the returned function is called.

    A backward begins where it reaches what the model returned. Of a compiled model only the
    forward is seen.
    """
    if is_compiled(model):
        return around_call(model, lambda: timeline.span("forward"))
    passes = _Passes(timeline)
    undo = ExitStack()
    begin = LiveHook(lambda *_: passes.begin("forward"))
    before = model.register_forward_pre_hook(begin, prepend=True)
    undo.callback(before.remove)
    end = LiveHook(lambda model, inputs, output: passes.end_forward(output))
    after = model.register_forward_hook(end, always_call=True)
    undo.callback(after.remove)
    return undo.close


class _Passes:
    """Open spans of the forward and backward passes in progress."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._open: dict[str, AbstractContextManager[None]] = {}

    def begin(self, name: str) -> None:
        """Begin a pass, unless it is under way."""
        if name not in self._open:
            self._open[name] = self._timeline.span(name)
            self._open[name].__enter__()

    def end_forward(self, output: object) -> None:
        """End the forward; its backward begins at the output."""
        self._end("forward")
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self._begin_backward)

    def _begin_backward(self, gradient: Tensor) -> None:
        if "backward" not in self._open:
            self.begin("backward")
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self._end("backward"))

    def _end(self, name: str) -> None:
        if (span := self._open.pop(name, None)) is not None:
            span.__exit__(None, None, None)
