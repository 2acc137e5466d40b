"""Which modules read which parameters: learned in the first step, not assumed.

A module usually reads its own parameters, but not only: `MultiheadAttention` reads its child's
(`out_proj`) without calling it. In the first step a dispatch mode sees every tensor operation
under autograd; an operation on a parameter is a read by the innermost module then running. A
parameter's readers are those and the module that owns it, so that a model which takes other paths
in later steps waits in the right places too. A parameter that is used and that no running module
was seen to read is read by code outside: nobody can wait there, so its update isn't put off.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

Readers = dict[nn.Module, list[nn.Parameter]]


def owners(model: nn.Module) -> Readers:
    """Map each module to the trainable parameters that it registers itself."""
    found: Readers = {}
    for module in model.modules():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad]
        if own:
            found[module] = own
    return found


class ReaderLesson:
    """Watches a model's calls until `finish` and tells who read what."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._running: list[nn.Module] = []
        self._mode = _ReadMode(model.parameters(), self._running)
        self._handles: list[RemovableHandle] = []
        for module in model.modules():
            self._handles.append(module.register_forward_pre_hook(self._enter))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    @property
    def seen(self) -> frozenset[nn.Parameter]:
        """The parameters that a running module was seen to read."""
        return frozenset(p for parameters in self._mode.reads.values() for p in parameters)

    def finish(self) -> Readers:
        """End the lesson; return each module's trainable parameters, owners' included."""
        for handle in self._handles:
            handle.remove()
        readers: dict[nn.Module, dict[nn.Parameter, None]] = defaultdict(dict)
        for module, parameters in [*owners(self._model).items(), *self._mode.reads.items()]:
            readers[module].update(dict.fromkeys(p for p in parameters if p.requires_grad))
        return {module: list(parameters) for module, parameters in readers.items()}

    def _enter(self, module: nn.Module, args: object) -> None:
        if not self._running:
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        self._running.append(module)

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        self._running.pop()
        if not self._running:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class _ReadMode(TorchDispatchMode):
    """Notes every operation on a parameter under the innermost running module."""

    def __init__(self, parameters: Iterable[nn.Parameter], running: list[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._by_id = {id(p): p for p in parameters}
        self._running = running
        self.reads: Readers = defaultdict(list)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and (p := self._by_id.get(id(value))) is not None:
                self.reads[self._running[-1]].append(p)
        return func(*args, **(kwargs or {}))
