"""Checksum of the targets of a step's loss: equal samples have equal ones, however augmented.

It is read from the graph of a loss that a script passes to backward: the labels of cross entropy,
the values of a regression. Targets may be alike by chance: a few labels of two classes, or those of
one class. If two targets have the same value with probability q, n of them are the same in two
independent batches with probability q^n: these are -n log2 q bits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm.host_copy import HostCopy
from paceline.replica.backward_calls import watch_backward_calls
from paceline.replica.input_checksum import is_readable, values_checksum

_NODES = 64  # that are looked at, from the loss on


class TargetChecksum:
    """Checksums of the targets of a run's losses, step by step."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._step: int | None = None  # whose first loss is still to come
        self._found: dict[int, HostCopy] = {}
        self._undo = watch_backward_calls(self)

    def begin(self, step: int) -> None:
        """Let the next backward pass be the first of a step."""
        self._step = step
        self._thread = threading.get_ident()

    def take(self, step: int) -> tuple[int, float]:
        """Return a step's checksum, 0 where there is none, and its bits."""
        copy = self._found.pop(step, None)
        known = None if copy is None else copy.known()
        return (0, 0.0) if known is None else (int(known[0]), known[1])

    def before_backward(
        self, outputs: Sequence[object], inputs: Sequence[object], *, create_graph: bool
    ) -> None:
        """Look at the graph of a loss, as `BackwardWatcher` does."""
        if threading.get_ident() != self._thread or inputs or self._step is None:
            return
        target = _target(outputs)
        if target is not None:
            self._found[self._step] = HostCopy(_checksum(target))
        self._step = None

    def close(self) -> None:
        """Look at no further loss."""
        self._undo()
        self._found.clear()


def _target(outputs: Sequence[object]) -> Tensor | None:
    """Return the first target on the way from the outputs."""
    nodes: deque[Any] = deque(getattr(one, "grad_fn", None) for one in outputs)
    for _ in range(_NODES):
        if not nodes:
            break
        node = nodes.popleft()
        if node is None:
            continue
        try:
            target = getattr(node, "_saved_target", None)
        except RuntimeError:  # it was changed in place since
            return None
        if is_readable(target):
            return target
        nodes.extend(each for each, _ in node.next_functions)
    return None


@torch.no_grad()
def _checksum(target: Tensor) -> Tensor:
    """Return a target's checksum and its bits, (2,) float64."""
    flat = target.reshape(-1)
    # Neighbours tell of q: too many of sorted targets are equal, which only makes bits fewer.
    equal = (flat == flat.roll(1)).double().sum()
    count = flat.numel()
    bits = -count * torch.log2((equal + 1) / (count + 1))
    return torch.cat([values_checksum([target]).double(), bits.reshape(1)])
