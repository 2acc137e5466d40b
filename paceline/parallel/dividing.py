"""Dividing of a model along the axis "tensor", by torch's `parallelize_module`."""

from __future__ import annotations

from itertools import chain

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

from paceline.comm.communicator import broadcast_all
from paceline.errors import ConfigError
from paceline.generation.run import Run
from paceline.parallel.plans import Plan, read_plan
from paceline.parallel.shards import divided_parameters, keep_shards
from paceline.parallel.tensor_group import AXIS, tensor_mesh
from paceline.parallel.whole_norm import count_once


def divide(model: nn.Module, run: Run, plan: Plan) -> None:
    """Divide a model's parameters, in place; collective along the axis "tensor".

    The values are those of the first tensor rank.

    Args:
        plan: as of `read_plan`.

    Raises:
        ConfigError: the plan breaks a rule, the ranks don't divide a parameter, or the plan
            separates tied weights.
    """
    styles = read_plan(model, plan)
    size = run.context.along(AXIS).size
    if size == 1:
        return
    tensors = [*chain(model.parameters(), model.buffers())]
    broadcast_all(run.context.group(AXIS, "steps"), tensors, "the broadcast to tensor ranks")
    tied = _names(model)
    wholes = [*model.parameters()]
    parallelize_module(model, tensor_mesh(run), styles, src_data_rank=None)
    _require_tied(model, tied)
    for name, p in model.named_parameters():
        if isinstance(p, DTensor):
            _require_even(name, p, size)
    keep_shards(model)
    shards = {*model.parameters()}
    for p in wholes:
        setattr(p, "paceline_divided", p not in shards)  # an earlier optimizer has it  # noqa: B010
    replicated = shards.difference(divided_parameters(model))
    first = run.context.along(AXIS).rank == 0
    count_once(model, run, AXIS, () if first else replicated)


def _names(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter."""
    names: dict[Tensor, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    return [*names.values()]


def _require_tied(model: nn.Module, tied: list[list[str]]) -> None:
    now = dict(model.named_parameters(remove_duplicate=False))
    for names in tied:
        if len({id(now[name]) for name in names}) > 1:
            raise ConfigError(
                f"{' and '.join(names)} are one parameter, which the plan would separate: leave "
                "all its modules out of the plan."
            )


def _require_even(name: str, p: DTensor, size: int) -> None:
    for placement in p.placements:
        if isinstance(placement, Shard) and p.shape[placement.dim] % size:
            raise ConfigError(
                f"{name} has the shape {tuple(p.shape)}, of which {size} tensor ranks don't divide "
                f"dimension {placement.dim}: choose a width that they divide, or leave the module "
                "out of the plan."
            )
