"""Dividing of a model along the axis "tensor", by torch's `parallelize_module`.

In a pipeline each stage is divided by itself, by the styles of the whole model's plan whose modules
it has. The stages agree that all of them can be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from paceline.comm.communicator import broadcast_all, gather_bytes
from paceline.errors import ConfigError
from paceline.generation.run import Run
from paceline.parallel.divided_modules import divided_dims
from paceline.parallel.plans import Plan, matched_modules, read_plan
from paceline.parallel.shards import keep_shards
from paceline.parallel.stage import Stage
from paceline.parallel.tensor_group import AXIS, tensor_mesh
from paceline.parallel.tied import tied_weights
from paceline.parallel.whole_norm import count_once


def divide(model: nn.Module, run: Run, plan: Plan) -> None:
    """Divide a model's parameters, in place; collective along the axis "tensor", and the stages.

    The values are those of the first tensor rank.

    Args:
        model: the whole model, or this rank's stage of it.
        plan: as of `read_plan`, for the whole model.

    Raises:
        ConfigError: the plan breaks a rule, the ranks don't divide a parameter, or the plan
            separates tied weights.
    """
    if isinstance(model, Stage):
        styles = read_plan(model.twin.whole, plan)
        _require_on_one_stage(model, styles)
    else:
        styles = read_plan(model, plan)
    size = run.context.along(AXIS).size
    if size == 1:
        return
    # torch warns of each module in which a path with wildcards matches nothing.
    styles = {name: s for path, s in styles.items() for name, _ in matched_modules(model, path)}
    tensors = [*chain(model.parameters(), model.buffers())]
    broadcast_all(run.context.group(AXIS, "steps"), tensors, "the broadcast to tensor ranks")
    tied = [*_names(model).values()]
    wholes = [*model.parameters()]
    if styles:
        parallelize_module(model, tensor_mesh(run), styles, src_data_rank=None)
    _require_none(_faults(model, tied, size), run if isinstance(model, Stage) else None)
    keep_shards(model)
    shards = {*model.parameters()}
    for p in wholes:
        setattr(p, "paceline_divided", p not in shards)  # an earlier optimizer has it  # noqa: B010
    own = dict(model.named_parameters(remove_duplicate=False))
    replicated = shards.difference(own[name] for name in divided_dims(model))
    first = run.context.along(AXIS).rank == 0
    count_once(model, run, AXIS, () if first else replicated)


def _require_on_one_stage(stage: Stage, styles: Mapping[str, ParallelStyle]) -> None:
    """Require that no weight which several stages have is divided: each would divide its own."""
    whole = stage.twin.whole
    divided = {
        p
        for path in styles
        for _, module in matched_modules(whole, path)
        for p in module.parameters()
    }
    parts = [[m for m in part.values() if m is not None] for part in stage.twin.parts]
    names = _names(whole)
    for p in tied_weights(parts):
        if p in divided:
            raise ConfigError(_separated(names[p]))


def _require_none(faults: Iterator[str], run: Run | None) -> None:
    """Raise the first fault; that of any stage, where a run's stages are divided. Collective."""
    texts = [next(faults, "")]
    if run is not None:
        what = "the division of the stages' layers"
        communicator = run.context.group("stage", "steps")
        texts = [data.decode() for data in gather_bytes(communicator, texts[0].encode(), what)]
    for text in filter(None, texts):
        raise ConfigError(text)


def _faults(model: nn.Module, tied: Sequence[Sequence[str]], size: int) -> Iterator[str]:
    """Yield what is wrong with a divided model."""
    now = dict(model.named_parameters(remove_duplicate=False))
    for names in tied:
        if len({id(now[name]) for name in names}) > 1:
            yield _separated(names)
    for name, p in model.named_parameters():
        for placement in p.placements if isinstance(p, DTensor) else ():
            if isinstance(placement, Shard) and p.shape[placement.dim] % size:
                yield (
                    f"{name} has the shape {tuple(p.shape)}, of which {size} tensor ranks don't "
                    f"divide dimension {placement.dim}: choose a width that they divide, or leave "
                    "the module out of the plan."
                )


def _names(model: nn.Module) -> dict[Tensor, list[str]]:
    """Return the names of each parameter."""
    names: dict[Tensor, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    return names


def _separated(names: Sequence[str]) -> str:
    return (
        f"{' and '.join(names)} are one parameter, which the plan would separate: leave all its "
        "modules out of the plan."
    )
