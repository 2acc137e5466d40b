"""Deferred initialization: tensors without memory, whose operations are recorded, and run later.

    with deferred_init():
        weight = torch.empty(4, 4)       on the meta device; its storage gets a history
        weight.normal_()                 recorded in it, with the generator's state before
    values_of([weight])                  runs both, with memory

A storage's history has the operations that wrote to it. Its values need these and, of what they
read, the earlier ones: so each tensor gets its values without all others. What draws random numbers
is also run at once, into memory that is freed at once: so the generator advances as if nothing were
deferred, and what was recorded can draw the same numbers again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_leaves, tree_map

from paceline.cluster.supervision.allocator import return_freed_memory

_TRIM_BYTES = 2**25


@contextmanager
def deferred_init() -> Iterator[None]:
    """Build a model without memory for its tensors; `paceline.stages` gives each rank its part's.

    The values are those that the model would have had without this, random numbers included. Inside
    the `with`, tensors are on torch's meta device. All that changes the model's parameters belongs
    there, too, such as initialization by hand, `model.double()` and `model.to(…)`.

        torch.manual_seed(0)
        with paceline.deferred_init():
            model = Model()
    """
    modes = _get_current_dispatch_mode_stack()
    if any(isinstance(mode, _Recorder) for mode in modes):
        yield  # within another
        return
    with _Recorder(), _Shown():
        yield


def has_values(tensor: Tensor) -> bool:
    """Return whether a tensor has memory, or operations that give it values."""
    return not tensor.is_meta or bool(_history(tensor).operations)


@torch.no_grad()
def values_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors with memory and values, for deferred ones; the random streams stay."""
    places = [_View.of(tensor) for tensor in tensors]
    with _disable_current_modes():
        memory = _replay(place.history for place in places)
        return_freed_memory()
        return [place.tensor(memory) for place in places]


@dataclass(eq=False)
class _History:
    """History of a storage.

    Attributes:
        bytes: its size.
        device: where its values will be.
        operations: what wrote to it, in order.
        clock: the number of the last operation that wrote to it or read it.
    """

    bytes: int
    device: torch.device
    operations: list[_Operation] = field(default_factory=list)
    clock: int = 0


_Memory = dict[_History, UntypedStorage]


@dataclass(frozen=True)
class _View:
    """View of a storage, as a tensor has it."""

    history: _History
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _View:
        offset = int(tensor.storage_offset())
        return cls(_history(tensor), tuple(tensor.size()), tensor.stride(), offset, tensor.dtype)

    def tensor(self, memory: _Memory) -> Tensor:
        """Return the tensor in memory, whose values are arbitrary where it has none yet."""
        history = self.history
        if history not in memory:
            fresh = torch.empty(history.bytes, dtype=torch.uint8, device=history.device)
            memory[history] = fresh.untyped_storage()
        empty = torch.empty(0, dtype=self.dtype, device=history.device)
        return empty.set_(memory[history], self.offset, self.shape, self.strides)


@dataclass(eq=False)
class _Operation:
    """Operation that was recorded.

    Attributes:
        function: of torch.
        arguments: args and kwargs, with places for deferred tensors.
        generator: of its random numbers; None: it draws none.
        state: of the generator, before.
        results: places of tensors that it returned.
        number: larger than that of each earlier operation on the same storages.
    """

    function: Any
    arguments: tuple[Sequence[Any], Mapping[str, Any]]
    generator: torch.Generator | None
    state: Any
    results: Sequence[_View] = ()
    number: int = 0

    @property
    def histories(self) -> set[_History]:
        """Those of its arguments."""
        return {leaf.history for leaf in tree_leaves(self.arguments) if isinstance(leaf, _View)}

    def run(self, memory: _Memory) -> Any:
        """Run it, with the same random numbers as ever; its results are in memory afterwards."""

        def real(value: Any) -> Any:
            return value.tensor(memory) if isinstance(value, _View) else value

        args, kwargs = tree_map(real, self.arguments)
        if self.generator is not None:
            self.generator.set_state(self.state)
        returned = self.function(*args, **kwargs)
        tensors = tree_leaves(returned)
        for place, tensor in zip(self.results, tensors if self.results else (), strict=True):
            if place.history in memory:
                continue
            if (tensor.stride(), tensor.storage_offset()) == (place.strides, place.offset):
                memory[place.history] = tensor.untyped_storage()
            else:
                place.tensor(memory).copy_(tensor)
        return returned

    def run_alone(self) -> Any:
        """Run it on the values that its arguments have now."""
        return self.run(_replay(self.histories))


def _replay(wanted: Iterable[_History]) -> _Memory:
    """Return the memory of storages, with their values; the others' is freed after its last use."""
    kept = {*wanted}
    last: dict[_History, _Operation] = {}
    operations = _needed(kept)
    for operation in operations:
        last.update(dict.fromkeys(operation.histories, operation))
        last.update({place.history: operation for place in operation.results})
    memory: _Memory = {}
    for operation in operations:
        generator = operation.generator
        if generator is None:
            operation.run(memory)
        else:
            later = generator.get_state()
            operation.run(memory)
            generator.set_state(later)
        for history in [one for one in memory if one not in kept and last[one] is operation]:
            del memory[history]
    return memory


def _needed(histories: Iterable[_History]) -> list[_Operation]:
    """Return the operations on which storages' values depend, in order."""
    found: set[_Operation] = set()
    open_ends = [(history, history.clock + 1) for history in histories]
    while open_ends:
        history, before = open_ends.pop()
        for operation in history.operations:
            if operation.number < before and operation not in found:
                found.add(operation)
                open_ends += [(one, operation.number) for one in operation.histories]
    return sorted(found, key=lambda operation: operation.number)


class _Shown(TorchFunctionMode):
    """Function mode that shows deferred tensors where their values will be.

    Functions of `torch.nn.init` leave tensors on the meta device alone.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__) and args[0].is_meta:
            args = values_of(args[:1])
        if func == _IS_META:
            return False
        if func == _DEVICE and args[0].is_meta:
            return _history(args[0]).device
        if func == _SET_DATA and args[0].is_meta and not args[1].is_meta:
            args = args[0], torch.empty(args[1].shape, dtype=args[1].dtype).copy_(args[1])
        return func(*args, **(kwargs or {}))


_IS_META = vars(torch._C.TensorBase)["is_meta"].__get__
_DEVICE = vars(torch._C.TensorBase)["device"].__get__
_SET_DATA = vars(torch._C.TensorBase)["data"].__set__
# What a batch norm writes to, which its schema doesn't say.
_STATISTICS = ("running_mean", "running_var")


class _Recorder(TorchDispatchMode):
    """Dispatch mode that makes new tensors on the meta device, and records what writes to them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._drawn = 0  # bytes of random numbers, since the last trim

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = dict(kwargs or {})
        tensors = _tensors((args, kwargs))
        names = {argument.name for argument in func._schema.arguments}
        makes = not tensors and "device" in names
        if not makes and not any(tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)
        if func.overloadpacket is torch.ops.aten.set_:
            return func(*args, **kwargs)  # the tensor gets another storage, with its history
        device = _device(kwargs, tensors)
        if makes:
            kwargs["device"] = device
        elif kwargs.get("device") == torch.device("meta"):
            del kwargs["device"]  # that of another deferred tensor
        written = _written(func, args, kwargs)
        operation = _operation(func, args, kwargs, device)
        if any(not one.is_meta for one in written) or not _returns_tensors(func):
            return operation.run_alone()
        if operation.generator is not None:
            only_fills = len(tensors) == len(written)
            operation.run({} if only_fills else _replay(operation.histories))
        try:
            returned = func(*tree_map(_on_meta, args), **_meta_arguments(kwargs))
        except NotImplementedError:  # the result's shape depends on values
            return operation.run_alone()
        if makes and "dtype" in names:
            kwargs["dtype"] = returned.dtype  # the default one may be another later
            operation.arguments = (args, kwargs)
        _record(operation, written, _tensors(returned), device)
        if operation.generator is not None:
            self._drawn += sum(tensor.nbytes for tensor in _tensors(returned))
            if self._drawn > _TRIM_BYTES:
                return_freed_memory()  # in whose holes the next tensor may not fit
                self._drawn = 0
        return returned


def _record(
    operation: _Operation, written: Sequence[Tensor], results: Sequence[Tensor], device: Any
) -> None:
    """Record an operation in the histories of what it wrote to; of a view there are none."""
    new = [one for one in results if not hasattr(one.untyped_storage(), "paceline_history")]
    histories = {_history(tensor, device) for tensor in (*written, *new)}
    operation.arguments = tree_map(_copied, operation.arguments)
    operation.results = [_View.of(tensor) for tensor in results]
    touched = operation.histories | histories
    operation.number = 1 + max(history.clock for history in touched)
    for history in touched:
        history.clock = operation.number
    for history in histories:
        history.operations.append(operation)


def _history(tensor: Tensor, device: torch.device | None = None) -> _History:
    """Return the history of a tensor's storage; of a new one, an empty one."""
    with torch._C.DisableTorchFunctionSubclass():  # a lazy module's tensor would refuse it
        storage: Any = tensor.untyped_storage()
    if not hasattr(storage, "paceline_history"):
        storage.paceline_history = _History(storage.nbytes(), device or torch.device("cpu"))
    history: _History = storage.paceline_history
    return history


def _operation(function: Any, args: Any, kwargs: Any, device: torch.device) -> _Operation:
    def placed(value: Any) -> Any:
        return _View.of(value) if isinstance(value, Tensor) and value.is_meta else value

    generator = None
    if torch.Tag.nondeterministic_seeded in function.tags:
        generator = kwargs.get("generator") or _default_generator(device)
    state = None if generator is None else generator.get_state()
    return _Operation(function, tree_map(placed, (args, kwargs)), generator, state)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def _device(kwargs: Mapping[str, Any], tensors: Sequence[Tensor]) -> torch.device:
    """Return where an operation would have its results, if nothing were deferred."""
    given = kwargs.get("device")
    if given is not None and given.type != "meta":
        return torch.device(given)
    for tensor in tensors:
        return _history(tensor).device if tensor.is_meta else tensor.device
    default = torch.get_default_device()
    return torch.device("cpu") if default.type == "meta" else default


def _written(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the arguments that an operation writes to."""
    arguments = function._schema.arguments
    given = {**{a.name: value for a, value in zip(arguments, args, strict=False)}, **kwargs}
    names = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    names += _STATISTICS if "batch_norm" in str(function) else ()
    return _tensors([given.get(name) for name in names])


def _returns_tensors(function: Any) -> bool:
    returns = function._schema.returns
    return not returns or any("Tensor" in str(one.type) for one in returns)


def _meta_arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: tree_map(_on_meta, value) for name, value in kwargs.items()}
    if "device" in found:
        found["device"] = torch.device("meta")
    if "generator" in found:
        found["generator"] = None  # which is of another device
    return found


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value  # it may change later


def _on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]
