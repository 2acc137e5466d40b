"""Replaces a method of one object, and takes the replacement back."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any


def patch(target: object, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Let `function(target, …)` stand in for a method; return what undoes that.

    The stand-in is a bound method, as torch's schedulers expect of `optimizer.step`.
    """
    attributes = vars(target)
    before = attributes.get(name)

    def method(this: object, *args: object, **kwargs: object) -> object:
        return function(this, *args, **kwargs)

    def undo() -> None:
        attributes.pop(name, None)
        if before is not None:
            attributes[name] = before

    method._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # the replica tells schedulers
    attributes[name] = MethodType(method, target)
    return undo
