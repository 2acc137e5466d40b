"""What a script gives to the checkpoints besides model and optimizer, by name.

    world.track(scheduler, scaler, average=ema)   ->   StepLR, GradScaler, average

An object's name is its class's, with a number from the second of a class on: they must be given in
the same order each time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.amp import GradScaler

from paceline.errors import ConfigError

_PLAIN = (Tensor, bool, int, float, complex, str, bytes, type(None))
_TORCH = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)


class Trackable(Protocol):
    """Something with a state that can be kept and given back: schedulers, scalers, averages."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state: Any) -> Any:
        """Take a state back."""


class Tracked:
    """The objects that a script tracks.

    Args:
        kept: their states in the checkpoint that the run goes on from, or None.
    """

    def __init__(self, kept: Mapping[str, Any] | None) -> None:
        self._kept = kept
        self._objects: dict[str, Trackable] = {}

    def add(self, named: Mapping[str, Trackable]) -> None:
        """Track objects, and give each the state that the checkpoint has.

        Raises:
            ConfigError: an object has no state, a name comes twice, or the checkpoint has other
                names or an unfit state.
        """
        for name, part in named.items():
            self._check(name, part)
            if self._kept is not None:
                _restore(name, part, self._kept)
            self._objects[name] = part

    def begin(self) -> None:
        """Look whether all that the checkpoint has is tracked, and let go of it.

        Raises:
            ConfigError: something isn't.
        """
        missing = [name for name in self._kept or () if name not in self._objects]
        if missing:
            raise ConfigError(
                f"the checkpoint holds the state of {missing[0]}, which isn't tracked: give "
                "world.track() the same objects as before, before the first step."
            )
        self._kept = None

    @property
    def scalers(self) -> list[GradScaler]:
        """The loss scalers among the objects."""
        return [part for part in self._objects.values() if isinstance(part, GradScaler)]

    def unnamed(self, parts: tuple[Trackable, ...]) -> dict[str, Trackable]:
        """Name objects by their classes."""
        named: dict[str, Trackable] = {}
        for part in parts:
            kind, number = type(part).__name__, 1
            name = kind
            while name in named or name in self._objects:
                number += 1
                name = f"{kind} {number}"
            named[name] = part
        return named

    def state_dict(self) -> dict[str, Any]:
        """Return the states by name."""
        return {name: part.state_dict() for name, part in self._objects.items()}

    def _check(self, name: str, part: Trackable) -> None:
        if name in self._objects:
            raise ConfigError(f"world.track(): {name} is tracked already; give each a name once.")
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise ConfigError(
                f"world.track(): {name} is a {type(part).__name__}, which has no state_dict() and "
                "load_state_dict(); give objects that have both."
            )
        refuse_foreign(name, part.state_dict())


def refuse_foreign(name: str, state: Any) -> None:
    """Look whether a state holds nothing that a checkpoint couldn't give back.

    Raises:
        ConfigError: a value is neither a tensor nor plain; names its place.
    """
    for where, value in _leaves(name, state):
        if not isinstance(value, _PLAIN + _TORCH):
            raise ConfigError(
                f"{where} is a {type(value).__module__}.{type(value).__qualname__}, and "
                "checkpoints keep tensors and plain values only: let state_dict() turn it into "
                "such."
            )


def _leaves(where: str, state: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from _leaves(f"{where}[{key!r}]", value)
    elif isinstance(state, list | tuple) and not isinstance(state, torch.Size):
        for place, value in enumerate(state):
            yield from _leaves(f"{where}[{place}]", value)
    else:
        yield where, state


def _restore(name: str, part: Trackable, kept: Mapping[str, Any]) -> None:
    if name not in kept:
        has = ", ".join(kept) or "nothing"
        raise ConfigError(
            f"world.track(): the checkpoint has no state of {name}; it has {has}: track the same "
            "objects in the same order as before, or give resume='no' and another run."
        )
    try:
        part.load_state_dict(kept[name])
    except (KeyError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"world.track(): the checkpoint's state of {name} doesn't fit: {reason}"
        ) from error
