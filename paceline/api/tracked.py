"""Tracked objects: what a script saves in checkpoints besides model and optimizer, by name.

    world.track(scheduler, scaler, average=ema)   ->   StepLR, GradScaler, average

An object's default name is its class's, with a number from the second of a class on. So each start
must pass the objects in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from paceline.errors import ConfigError
from paceline.session.session import Session
from paceline.state.stateful import Restorable

TRACKED = "tracked"
"""The entry of a checkpoint."""

_PLAIN = (Tensor, bool, int, float, complex, str, bytes, type(None))
_TORCH = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)


class Tracked:
    """Registry of the objects passed to `world.track()`, whose state is in checkpoints.

    Args:
        session: knows where the run starts: its checkpoint has the objects' states.

    Attributes:
        objects: the objects, by name.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.objects: dict[str, Restorable] = {}

    def add(self, named: Mapping[str, Restorable]) -> None:
        """Track objects, and restore each one's state from the checkpoint.

        Raises:
            ConfigError: an object has no state, a name is used twice, or the checkpoint has other
                names or a state that doesn't fit.
        """
        for name, tracked in named.items():
            self._check(name, tracked)
            self._session.start.given.add_object(name, tracked)
            self.restore({name: tracked})
            self.objects[name] = tracked

    def restore(self, named: Mapping[str, Restorable]) -> None:
        """Restore objects from the checkpoint, if there is one; as `add`."""
        state = self._session.start.edited
        for name, tracked in named.items() if state is not None else ():
            _restore(name, tracked, (state or {}).get(TRACKED, {}))

    def restore_schedules_of(self, optimizer: Optimizer) -> None:
        """Restore the schedules of an optimizer; as `restore`."""
        objects = self.objects.items()
        self.restore(
            {name: one for name, one in objects if getattr(one, "optimizer", None) is optimizer}
        )

    def require_all(self) -> None:
        """Require that all states of the checkpoint are restored.

        Raises:
            ConfigError: an object isn't tracked.
        """
        saved = (self._session.start.state or {}).get(TRACKED, {})
        missing = [name for name in saved if name not in self.objects]
        if missing:
            raise ConfigError(
                f"the checkpoint has the state of {missing[0]}, which isn't tracked: pass the same "
                "objects to world.track() before the first step."
            )

    @property
    def scalers(self) -> list[GradScaler]:
        """The loss scalers among the objects."""
        return [tracked for tracked in self.objects.values() if isinstance(tracked, GradScaler)]

    def default_names(self, objects: tuple[Restorable, ...]) -> dict[str, Restorable]:
        """Return objects by their default names."""
        named: dict[str, Restorable] = {}
        for tracked in objects:
            kind = type(tracked).__name__
            number = 1
            name = kind
            while name in named or name in self.objects:
                number += 1
                name = f"{kind} {number}"
            named[name] = tracked
        return named

    def state_dict(self) -> dict[str, Any]:
        """Return the states by name."""
        return {name: tracked.state_dict() for name, tracked in self.objects.items()}

    def _check(self, name: str, tracked: Restorable) -> None:
        if name in self.objects:
            raise ConfigError(f"world.track(): {name} is already tracked; names must be unique.")
        if not (hasattr(tracked, "state_dict") and hasattr(tracked, "load_state_dict")):
            raise ConfigError(
                f"world.track(): {name} is a {type(tracked).__name__}, which has no state_dict() "
                "and load_state_dict(); pass objects that have both methods."
            )
        refuse_foreign(name, tracked.state_dict())


def refuse_foreign(name: str, state: Any) -> None:
    """Require that a checkpoint can hold a state.

    Raises:
        ConfigError: a value is neither a tensor nor plain; names where it is.
    """
    for where, value in _leaves(name, state):
        if not isinstance(value, _PLAIN + _TORCH):
            raise ConfigError(
                f"{where} is a {type(value).__module__}.{type(value).__qualname__}, but "
                "checkpoints hold only tensors and plain values: convert it in state_dict()."
            )


def _leaves(where: str, state: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from _leaves(f"{where}[{key!r}]", value)
    elif isinstance(state, list | tuple) and not isinstance(state, torch.Size):
        for index, value in enumerate(state):
            yield from _leaves(f"{where}[{index}]", value)
    else:
        yield where, state


def _restore(name: str, tracked: Restorable, saved: Mapping[str, Any]) -> None:
    if name not in saved:
        has = ", ".join(saved) or "nothing"
        raise ConfigError(
            f"world.track(): the checkpoint has no state of {name} (it has {has}): track the same "
            "objects in the same order, or begin another run with resume='no'."
        )
    try:
        tracked.load_state_dict(saved[name])
    except (KeyError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"world.track(): the checkpoint's state of {name} doesn't fit: {reason}"
        ) from error
