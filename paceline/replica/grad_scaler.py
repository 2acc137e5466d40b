"""Meets torch's `GradScaler`, which unscales gradients behind autograd's back.

Its kernel doesn't count as a change of a tensor. But before anything else `GradScaler.step` asks a
flag of the optimizer, whether its kernel unscales by itself; the witness stands in for that flag.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer

FLAG = "_step_supports_amp_scaling"


class ScalerFlag:
    """The flag's value, and a call when a scaler asks for it."""

    def __init__(self, value: bool, asked: Callable[[], None]) -> None:
        self._value, self._asked = value, asked

    def __bool__(self) -> bool:
        self._asked()
        return self._value


def watch_scaler(optimizer: Optimizer, asked: Callable[[], None]) -> Callable[[], None]:
    """Call `asked` when a `GradScaler.step(optimizer)` begins; return what undoes that."""
    attributes = vars(optimizer)
    before = attributes.get(FLAG)
    attributes[FLAG] = ScalerFlag(bool(before), asked)

    def undo() -> None:
        del attributes[FLAG]
        if before is not None:
            attributes[FLAG] = before

    return undo
