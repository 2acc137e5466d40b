"""Read tracing: finds which modules read which parameters, in the first step.

A module usually reads its own parameters, but not only: `MultiheadAttention` reads its child's
(`out_proj`) without calling it. In the first step a dispatch mode sees every tensor operation
under autograd; an operation on a parameter is a read by the innermost running module. A
parameter's readers are those modules and the module that registers it. A module that didn't run in
the first step (a layer that was dropped) may read any parameter: it waits for all. A module that
ran, and that reads another module's parameter in a later step only, isn't found: such a model calls
`settle()` first. A compiled module counts as registering all parameters in it, and its inside isn't
traced. A used parameter that no running module was seen to read is read by code outside, and so is
one that no module registers. No module can wait there, so its update isn't deferred.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.errors import ConfigError
from paceline.replica.compiled_modules import around_call, is_compiled, visible_modules
from paceline.replica.live_hooks import LiveHook

Readers = dict[nn.Module, list[nn.Parameter]]


@dataclass(frozen=True, kw_only=True)
class ReadMap:
    """Result of read tracing: the parameters that each module reads.

    Attributes:
        readers: for each module, the trainable parameters that it reads.
        outside: parameters for which no module's hook can wait: those that only the optimizer has,
            and those that are read while no module runs.
        accumulates: whether several backward passes of the step added to the same gradient.
    """

    readers: Readers
    outside: frozenset[nn.Parameter]
    accumulates: bool = False


def registering_modules(model: nn.Module) -> Readers:
    """Map each module to the trainable parameters that it registers; if compiled, all inside it."""
    found: Readers = {}
    for module in visible_modules(model):
        own = [p for p in module.parameters(recurse=is_compiled(module)) if p.requires_grad]
        if own:
            found[module] = own
    return found


class ReadTracer:
    """Tracer of a model's calls: records which module reads which parameter, until `finish`.

    Attributes:
        used: the parameters that got a gradient.
        accumulates: as in `ReadMap`; set by the hooks on gradients.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._registering = registering_modules(model)
        self._running: list[nn.Module] = []
        self._over = False
        self._mode = _ReadMode(model.parameters(), self._running)
        self.used: set[nn.Parameter] = set()
        self.accumulates = False
        self._ran: set[nn.Module] = set()
        self._undo = ExitStack()
        for module in visible_modules(model):
            if is_compiled(module):
                self._undo.callback(around_call(module, self._pause))
            else:
                self._undo.callback(module.register_forward_pre_hook(LiveHook(self._enter)).remove)
                left = module.register_forward_hook(LiveHook(self._leave), always_call=True)
                self._undo.callback(left.remove)

    def finish(self, parameters: Iterable[nn.Parameter]) -> ReadMap:
        """End the tracing; return which modules read or register which parameters."""
        self._over = True
        self._undo.close()
        readers: dict[nn.Module, dict[nn.Parameter, None]] = defaultdict(dict)
        for module, own in [*self._registering.items(), *self._mode.reads.items()]:
            readers[module].update(dict.fromkeys(p for p in own if p.requires_grad))
        for module in visible_modules(self._model):
            if module not in self._ran and not is_compiled(module):
                trained = (p for p in self._model.parameters() if p.requires_grad)
                readers[module].update(dict.fromkeys(trained))
        registered = {p for own in self._registering.values() for p in own}
        compiled = {p for m, own in self._registering.items() if is_compiled(m) for p in own}
        seen = compiled.union(*self._mode.reads.values())
        return ReadMap(
            readers={module: list(own) for module, own in readers.items()},
            outside=frozenset(
                p for p in parameters if p not in registered or (p in self.used and p not in seen)
            ),
            accumulates=self.accumulates,
        )

    def _enter(self, module: nn.Module, args: object) -> None:
        if self._over:
            return
        if not self._running:
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        self._running.append(module)
        self._ran.add(module)

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        if self._over:
            return
        self._running.pop()
        if not self._running:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """Suspend the tracing: torch.compile would compile it, too."""
        if not self._running:
            yield
            return
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self._mode.__enter__()  # type: ignore[no-untyped-call]


_TABLES = (torch.ops.aten.embedding.default, torch.ops.aten._embedding_bag.default)


class _ReadMode(TorchDispatchMode):
    """Dispatch mode that records each read of a parameter for the innermost running module."""

    def __init__(self, parameters: Iterable[nn.Parameter], running: list[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._by_id = {id(p): p for p in parameters}
        self._running = running
        self.reads: Readers = defaultdict(list)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func is torch.ops.aten.embedding_renorm_.default and self._is_alias(args[0]):
            module = type(self._running[-1]).__name__
            raise renormalised(f"{module} calls embedding() with max_norm")
        if func in _TABLES and len(args) > 3 and args[3] and self._is_alias(args[0]):
            module = type(self._running[-1]).__name__
            raise scaled_by_frequency(f"{module} calls embedding() with scale_grad_by_freq=True")
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and (p := self._by_id.get(id(value))) is not None:
                self.reads[self._running[-1]].append(p)
        return func(*args, **(kwargs or {}))

    def _is_alias(self, tensor: Tensor) -> bool:
        memory = tensor.untyped_storage().data_ptr()
        return any(memory == p.untyped_storage().data_ptr() for p in self._by_id.values())


def scaled_by_frequency(subject: str) -> ConfigError:
    """Return the error for an embedding whose gradient depends on how often a batch has a row."""
    return ConfigError(
        f"{subject}, which divides a row's gradient by its count in this rank's samples, where one "
        "process would count all samples: pass scale_grad_by_freq=False."
    )


def renormalised(subject: str) -> ConfigError:
    """Return the error for an embedding whose forward writes its table."""
    return ConfigError(
        f"{subject}, by which each rank renormalises only the rows that it reads, so that "
        "the ranks' models would differ: pass max_norm=None, and renormalise all rows after "
        "optimizer.step(), by weight.data.renorm_(2, 0, max_norm)."
    )
