"""Values for a model whose tensors are on the meta device: of one stage, and only of it.

    deferred_init()             the constructor was recorded
    torch.device("meta")        it wasn't: reset_parameters() of each module is recorded now,
                                children first, as constructors call it

What was recorded runs for a stage's own tensors. The other stages' stay on the meta device.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.parallel.deferred import deferred_init, has_values, values_of

RESETS = (
    "the model was built on the meta device, so its values are those of its modules' "
    "reset_parameters(). Build it in `with paceline.deferred_init():` for its constructor's."
)
"""What `paceline.stages` says about a model whose constructor wasn't recorded."""


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a module."""
    return [*module.parameters(), *module.buffers()]


def record_resets(model: nn.Module) -> bool:
    """Record `reset_parameters` of the modules whose tensors nothing gives values.

    Returns:
        whether there were any.

    Raises:
        ConfigError: it leaves a tensor without values.
    """
    missing = {tensor for tensor in tensors_of(model) if not has_values(tensor)}
    for path, module in _children_first(model, "", set()):
        if missing.isdisjoint(tensors_of(module)):
            continue
        reset = getattr(module, "reset_parameters", None)
        reset = reset or getattr(module, "_reset_parameters", None)  # as torch's attention has it
        if reset is not None:
            with deferred_init():
                reset()
        own = chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
        if names := [name for name, tensor in own if not has_values(tensor)]:
            raise ConfigError(
                f"the model's {path or 'root'} ({type(module).__name__}) has {', '.join(names)} on "
                "the meta device, and no reset_parameters() that gives them values: build the "
                "model in `with paceline.deferred_init():`, which records its constructor, or "
                "write that method."
            )
    return bool(missing)


def materialize(model: nn.Module, tensors: Iterable[Tensor], device: torch.device) -> None:
    """Give some of a model's tensors their values, everywhere in the model.

    Args:
        model: the model, in whose modules tensors with values take the place of those without.
        tensors: parameters and buffers of it.
        device: where the values shall be.
    """
    chosen = [*dict.fromkeys(t for t in tensors if t.device != device)]
    real = dict(zip(chosen, _with_values(chosen, device), strict=True))
    for module in model.modules():
        for place in (module._parameters, module._buffers):
            for name, tensor in place.items():
                if tensor is not None and tensor in real:
                    place[name] = real[tensor]  # type: ignore[assignment]


def real_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose tensors have values."""
    deferred = [tensor for tensor in tensors_of(module) if tensor.is_meta]
    real = _with_values(deferred)
    return copy.deepcopy(module, {id(a): b for a, b in zip(deferred, real, strict=True)})


def _with_values(tensors: Sequence[Tensor], device: torch.device | None = None) -> list[Tensor]:
    """Return tensors with values; a parameter as one, with its attributes."""
    deferred = [tensor for tensor in tensors if tensor.is_meta]
    values = iter(values_of(deferred))
    found = []
    for tensor in tensors:
        value = next(values) if tensor.is_meta else tensor.detach()
        value = value if device is None else value.to(device)
        if isinstance(tensor, nn.Parameter):
            value = torch.Tensor._make_subclass(type(tensor), value, tensor.requires_grad)
            value.__dict__.update(tensor.__dict__)
        found.append(value)
    return found


def _children_first(
    module: nn.Module, path: str, seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model with their paths, each behind its children, and once."""
    seen.add(module)
    for name, child in module.named_children():
        if child not in seen:
            yield from _children_first(child, f"{path}.{name}" if path else name, seen)
    yield path, module
