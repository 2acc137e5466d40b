"""Backward calls: replicas look at each backward pass that a script starts, before it runs.

    loss.backward()                    ┐
    torch.autograd.backward(loss)      ├─▶ replicas look ─▶ autograd's engine
    torch.autograd.grad(loss, inputs)  ┘

torch has no hook there. All of these call one function of torch, by its name in `torch.autograd`,
which is wrapped until the process ends, as `torch.compiler` wraps it for a while.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Protocol
from weakref import WeakSet

import torch

_NAME = "_engine_run_backward"
_lock = threading.Lock()


class BackwardWatcher(Protocol):
    """Protocol of what looks at backward passes before they run."""

    def before_backward(
        self, outputs: Sequence[object], inputs: Sequence[object], *, create_graph: bool
    ) -> None:
        """Look at a backward pass that is about to begin in this thread.

        Args:
            outputs: tensors and edges that are differentiated.
            inputs: tensors and edges with respect to which `torch.autograd.grad` returns gradients;
                empty where gradients are accumulated in `.grad`.
            create_graph: whether the gradients can be differentiated.

        Raises:
            ConfigError: the pass must not run.
        """


_watchers: WeakSet[BackwardWatcher] = WeakSet()


def watch_backward_calls(watcher: BackwardWatcher) -> Callable[[], None]:
    """Let a watcher look at each backward pass, as long as it lives; return what undoes that."""
    with _lock:
        plain = getattr(torch.autograd, _NAME)
        if not hasattr(plain, "_shows_calls"):
            setattr(torch.autograd, _NAME, _showing(plain))
        _watchers.add(watcher)

    def undo() -> None:
        with _lock:
            _watchers.discard(watcher)

    return undo


def _showing(plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def run(
        outputs: Any,
        gradients: Any,
        retain: bool,
        create_graph: bool,
        inputs: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        asked = () if kwargs["accumulate_grad"] else inputs
        with _lock:
            watchers = list(_watchers)
        for watcher in watchers:
            watcher.before_backward(outputs, asked, create_graph=create_graph)
        return plain(outputs, gradients, retain, create_graph, inputs, *args, **kwargs)

    run._shows_calls = True  # type: ignore[attr-defined]
    return run
