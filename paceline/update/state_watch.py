"""Watch on `optimizer.state`: what is pending is completed before a script reads or writes it.

An update may be pending after `optimizer.step()`, and with `--update sharded` the state of a
parameter lies on the ranks that own it. So a script that uses `optimizer.state` between two steps
gets the same as in plain torch, or an error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class WatchedState(MutableMapping[Tensor, Any]):
    """Optimizer state that calls functions before each use of it by a script.

    Args:
        plain: the state itself, for each parameter its own.

    Attributes:
        plain: the state itself, whose use calls nothing.
        callbacks: the functions to call.
    """

    def __init__(self, plain: dict[Tensor, Any]) -> None:
        self.plain = plain
        self.callbacks: list[Callable[[], None]] = []

    def __getitem__(self, parameter: Tensor) -> Any:
        return self._used()[parameter]

    def __setitem__(self, parameter: Tensor, state: Any) -> None:
        self._used()[parameter] = state

    def __delitem__(self, parameter: Tensor) -> None:
        del self._used()[parameter]

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._used()

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._used())

    def __len__(self) -> int:
        return len(self._used())

    def __repr__(self) -> str:
        return repr(self._used())

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict, self._used())  # a copy of it isn't watched

    def get(self, parameter: Tensor, default: Any = None) -> Any:
        """Return a parameter's state, or the default, without making one."""
        return self._used().get(parameter, default)

    def pop(self, parameter: Tensor, *default: Any) -> Any:
        """Remove and return a parameter's state, or return the default."""
        return self._used().pop(parameter, *default)

    def setdefault(self, parameter: Tensor, default: Any = None) -> Any:
        """Return a parameter's state; make it the default where there is none."""
        return self._used().setdefault(parameter, default)

    def _used(self) -> dict[Tensor, Any]:
        for callback in self.callbacks:
            callback()
        return self.plain


def watch_state(optimizer: Optimizer, callback: Callable[[], None]) -> None:
    """Call a function before each use of an optimizer's present state by a script; once each."""
    state: Any = optimizer.state
    if not isinstance(state, WatchedState):
        optimizer.state = state = WatchedState(state)  # type: ignore[assignment]
    # A callback per owner, not one per step: `freeze` watches anew each time.
    if callback not in state.callbacks:
        state.callbacks.append(callback)


def unwatch_state(optimizer: Optimizer, callback: Callable[[], None]) -> None:
    """Call the function no more; without any, the optimizer has its plain state again."""
    state: Any = optimizer.state
    if isinstance(state, WatchedState) and callback in state.callbacks:
        state.callbacks.remove(callback)
        if not state.callbacks:
            optimizer.state = state.plain  # type: ignore[assignment]


def plain_state(optimizer: Optimizer) -> dict[Tensor, Any]:
    """Return an optimizer's present state itself, whose use calls nothing."""
    state: Any = optimizer.state
    return state.plain if isinstance(state, WatchedState) else state
