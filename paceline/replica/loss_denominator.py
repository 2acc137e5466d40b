"""Denominator of a mean loss, where torch's cross entropy leaves labels out or weighs classes.

    loss ── … ── nll_loss, reduction "mean"      its total weight: labels that aren't ignored,
                                                 or the sum of the class weights of all labels

It is read from the graph of a loss that a script passes to backward, and copied from the device
behind the step, so that no step waits for it. Other means (of a mask, say) aren't seen.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from paceline.comm.host_copy import HostCopy
from paceline.replica.backward_calls import watch_backward_calls

_LOSSES = ("NllLossBackward0", "NllLoss2DBackward0")
_MEAN = 1  # torch's number of the reduction
_NODES = 64  # that are looked at, from the loss on


class LossDenominator:
    """Denominators of the losses of a run's steps: the total weight that each is a mean over.

    Attributes:
        backwards: the number of backward passes of this thread since the last step's end.
    """

    def __init__(self) -> None:
        self.backwards = 0
        self._thread = threading.get_ident()
        self._step: int | None = None
        self._found: dict[int, HostCopy] = {}
        self._undo = watch_backward_calls(self)

    def begin(self, step: int) -> None:
        """Let the backward passes that follow be those of a step."""
        self._step = step
        self._thread = threading.get_ident()

    def end(self) -> None:
        """End the step."""
        self._step = None
        self.backwards = 0

    def take(self, step: int) -> float | None:
        """Return what the loss of a step was a mean over; None where that isn't known."""
        copy = self._found.pop(step, None)
        known = None if copy is None else copy.known()
        return None if known is None else float(known[0])

    def before_backward(
        self, outputs: Sequence[object], inputs: Sequence[object], *, create_graph: bool
    ) -> None:
        """Look at the graph of a loss, as `BackwardWatcher` does."""
        if threading.get_ident() != self._thread or inputs:
            return
        self.backwards += 1
        if self._step is not None and (total := _total_weight(outputs)) is not None:
            self._found[self._step] = HostCopy(total.reshape(1))

    def close(self) -> None:
        """Look at no further backward."""
        self._undo()
        self._found.clear()


def _total_weight(outputs: Sequence[object]) -> Tensor | None:
    """Return the total weight of the first mean of labels on the way from the outputs."""
    nodes: deque[Any] = deque(getattr(one, "grad_fn", None) for one in outputs)
    seen: set[Any] = set()
    while nodes and len(seen) < _NODES:
        node = nodes.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() in _LOSSES and node._saved_reduction == _MEAN:
            total: Tensor = node._saved_total_weight
            return total
        nodes.extend(each for each, _ in node.next_functions)
    return None
