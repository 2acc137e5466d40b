"""Shards: what a rank has of parameters that are divided along the axis "tensor".

    optimizer, exchange, checkpoint        module.forward
    plain parameter, the shard ──────────► DTensor of the whole
                     gradient ◄─────────── its gradient, in the shard's placement

A module's parameter is this rank's shard, a plain tensor. Where code reads it as an attribute, it
gets a DTensor around the shard, made anew each time; its gradient returns to the shard. So all that
exchanges, updates and saves parameters knows of shards alone, as of any parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.parallel.divided_modules import WHOLES, wholes_of


@dataclass(frozen=True)
class Whole:
    """Description of a whole parameter, of which each rank has a shard.

    Attributes:
        mesh: torch's mesh of the tensor ranks.
        placements: how it is divided, or that each rank has all of it.
        shape: the whole's shape.
        stride: its stride.
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def of(self, shard: Tensor) -> Tensor:
        """Return the whole as a DTensor, around a shard."""
        return DTensor.from_local(
            shard,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )


def keep_shards(model: nn.Module) -> None:
    """Replace each DTensor parameter by its shard, which the module reads as the whole."""
    shards: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        wholes: dict[str, Whole] = {}
        for name, p in module._parameters.items():
            if isinstance(p, DTensor):
                wholes[name] = Whole(p.device_mesh, p.placements, p.shape, p.stride())
                if p not in shards:
                    shards[p] = _shard_of(p)
        for name in wholes:
            module._parameters[name] = shards[module._parameters[name]]  # type: ignore[index]
        if wholes:
            module.__class__ = _reading(type(module), wholes)


def _shard_of(p: DTensor) -> nn.Parameter:
    local = p.to_local().detach().clone(memory_format=torch.contiguous_format)
    return nn.Parameter(local, requires_grad=p.requires_grad)


def _reading(kind: type[nn.Module], wholes: dict[str, Whole]) -> type[nn.Module]:
    """Return a subclass that reads some parameters as wholes, under the name of `kind`."""
    members: dict[str, Any] = {name: property(partial(_read, name)) for name in wholes}
    members[WHOLES] = wholes
    return _named_like(kind, members)


def _named_like(kind: type[nn.Module], members: dict[str, Any]) -> type[nn.Module]:
    """Return a subclass with some members, under the name of `kind`."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {**names, **members})


def _read(name: str, module: nn.Module) -> Tensor | None:
    shard = module._parameters[name]
    if shard is None:
        return None
    whole: Whole = wholes_of(module)[name]
    return whole.of(shard)
