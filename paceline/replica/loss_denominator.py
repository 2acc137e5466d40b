"""Denominator of a loss, as its graph shows it: labels, pixels of a mask, samples.

    loss ── … ── nll_loss, reduction "mean"      its total weight: labels that aren't ignored,
                                                 or the sum of the class weights of all labels
    loss ── … ── mean, mse_loss, …               the number of values
    loss ── … ── a sum, divided by a number      that number
    loss ── … ── a sum                           none: it grows with the samples

It is read from the graph of a loss that a script passes to backward, and copied from the device
behind the step, so that no step waits for it. Means that are written otherwise aren't seen.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from paceline.comm.host_copy import HostCopy
from paceline.replica.backward_calls import watch_backward_calls

_LABELS = ("NllLossBackward0", "NllLoss2DBackward0")
_SUMS = ("SumBackward0", "NansumBackward0")
_OF_SCALARS = ("StackBackward0", "CatBackward0")  # of losses, which are then added
_SAME = ("AddBackward0", "SubBackward0", "NegBackward0", "ToCopyBackward0", "ViewBackward0")
_MEAN = 1  # torch's number of the reduction
_SUM = 2
_NODES = 64  # that are looked at, from the loss on


@dataclass(frozen=True, kw_only=True)
class LossTotal:
    """What a loss is a mean over.

    Attributes:
        total: the number of values, or the sum of their weights; None: the loss is a sum.
        values: the number of values that are added; None where it isn't known.
        divides: whether the script divides a sum by the total.
    """

    total: float | None
    values: int | None = None
    divides: bool = False


class LossDenominator:
    """Denominators of the losses of a run's steps: what each is a mean over.

    Attributes:
        backwards: the number of backward passes of this thread since the last step's end.
    """

    def __init__(self) -> None:
        self.backwards = 0
        self._thread = threading.get_ident()
        self._step: int | None = None
        self._found: dict[int, tuple[LossTotal, HostCopy | None]] = {}
        self._undo = watch_backward_calls(self)

    def begin(self, step: int) -> None:
        """Let the backward passes that follow be those of a step."""
        self._step = step
        self._thread = threading.get_ident()

    def end(self) -> None:
        """End the step."""
        self._step = None
        self.backwards = 0

    def take(self, step: int) -> LossTotal | None:
        """Return what the loss of a step was a mean over; None where that isn't known."""
        found, copy = self._found.pop(step, (None, None))
        if found is None or copy is None:
            return found
        known = copy.known()
        return None if known is None else replace(found, total=float(known[0]))

    def before_backward(
        self, outputs: Sequence[object], inputs: Sequence[object], *, create_graph: bool
    ) -> None:
        """Look at the graph of a loss, as `BackwardWatcher` does."""
        if threading.get_ident() != self._thread or inputs:
            return
        self.backwards += 1
        if self._step is None:
            return
        total = _total_weight(outputs)
        found: LossTotal | None = LossTotal(total=0.0)
        if total is None:
            found, total = _reduced(outputs)
        if found is not None:
            copy = None if total is None else HostCopy(total.detach().reshape(1))
            self._found[self._step] = found, copy

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
        if node.name() in _LABELS and node._saved_reduction == _MEAN:
            total: Tensor = node._saved_total_weight
            return total
        nodes.extend(each for each, _ in node.next_functions)
    return None


def _reduced(outputs: Sequence[object]) -> tuple[LossTotal | None, Tensor | None]:
    """Return what the first mean on the way from the outputs is over, and a divisor in a tensor.

    The way leads through sums and multiples of scalars. A sum counts if there is no mean.
    """
    nodes: deque[tuple[Any, Tensor | None, bool]] = deque(
        (getattr(one, "grad_fn", None), None, False) for one in outputs
    )
    added = None
    for _ in range(_NODES):
        if not nodes:
            break
        node, divisor, scaled = nodes.popleft()
        if node is None:
            continue
        name = node.name()
        following = [each for each, _ in node.next_functions]
        reduction = getattr(node, "_saved_reduction", None)
        if name == "MeanBackward0" or reduction == _MEAN:
            values = _values(node)
            return None if values is None else LossTotal(total=float(values), values=values), None
        if name in _SUMS and following[0] is not None and following[0].name() in _OF_SCALARS:
            nodes.extend((each, divisor, scaled) for each, _ in following[0].next_functions)
        elif name in _SUMS or reduction == _SUM:
            values = _values(node)
            if divisor is not None:
                return LossTotal(total=0.0, values=values, divides=not scaled), divisor
            added = added or (None if scaled else LossTotal(total=None, values=values))
        elif name == "DivBackward0" and node._saved_other.numel() == 1:
            nodes.append((following[0], node._saved_other, scaled or divisor is not None))
        elif name == "MulBackward0":
            nodes.extend((each, None, True) for each in following)
        elif name in _SAME:
            nodes.extend((each, divisor, scaled) for each in following)
    return added, None


def _values(node: Any) -> int | None:
    """Return the number of values that a node reduces; None where it isn't known."""
    if hasattr(node, "_saved_self_sym_sizes"):
        return int(math.prod(node._saved_self_sym_sizes))
    try:
        labelled = node.name() in _LABELS
        return int((node._saved_target if labelled else node._saved_self).numel())
    except (AttributeError, RuntimeError):  # it was changed in place since
        return None
