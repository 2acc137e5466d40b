"""Cutting of a model into stages: checks what was given, and makes this rank's stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path

from torch import nn
from torch.nn.parameter import is_lazy

from paceline.comm.communicator import broadcast_all, require_same_call
from paceline.errors import ConfigError, many
from paceline.generation.run import Run
from paceline.parallel.blocks import block_paths, cut_paths, glue_of, is_inside, take_part
from paceline.parallel.cuts import CutChoice
from paceline.parallel.divided_modules import wholes_of
from paceline.parallel.interpreter import GradientSync
from paceline.parallel.materialize import RESETS, materialize, record_resets, tensors_of
from paceline.parallel.meta_twin import MetaTwin
from paceline.parallel.pipeline import CALL, Pipeline, PipelineOptions
from paceline.parallel.schedules import make_schedule
from paceline.parallel.stage import Stage
from paceline.parallel.tied import TiedWeights, tied_weights
from paceline.parallel.whole_norm import count_once

BATCH_NORM = (
    "the model has BatchNorm: in a pipeline its statistics are those of each microbatch, as in one "
    "process that runs the same microbatches one after the other."
)
"""What a pipeline says about a model with batch statistics."""
_HOOKS = ("forward", "forward_pre", "backward", "backward_pre")


def cut_model(
    model: nn.Module,
    run: Run,
    replica: GradientSync,
    options: PipelineOptions,
    *,
    report: Callable[[str], None],
    folder: Path | None = None,
) -> Stage:
    """Return this rank's stage of a model; collective along the stages.

    Args:
        run: whose ranks along the axis "stage" are the stages.
        replica: exchanges gradients along the axis "data".
        report: gets sentences for the user, on rank 0.
        folder: the run's, which has the cuts that were chosen; None: they aren't written down.
    """
    group = run.context.along("stage")
    _refuse_divided(model)
    _refuse_lazy(model)
    schedule = make_schedule(options.schedule, group.size, options.microbatches)
    paths = block_paths(model, options.blocks)
    glue = glue_of(model)
    cuts = options.cuts
    _require(cuts, paths, group.size)
    if record_resets(model) and run.leads:
        report(RESETS)
    if group.size == 1:
        cuts = ()
    elif cuts is None:
        choice = CutChoice(model, paths, glue, options.first_microbatch, options.spelled)
        cuts = choice.make(run, folder, report)
    if group.size > 1:
        given = f"cuts={[*cuts]}, schedule={options.schedule!r}, "
        given += f"microbatches={options.microbatches}"
        communicator = run.context.group("stage", "steps")
        require_same_call(communicator, CALL, given, CALL, remedy="pass the same on all stages")
    parts = [take_part(model, some) for some in cut_paths(paths, cuts)]
    _require_parameters(parts)
    _require_apart(model, parts, paths)
    runs = [*parts[group.rank]]
    keys = [*model.state_dict()]
    twin = MetaTwin(model, parts, glue)
    used = {name for part in parts for name in part}
    # What no block has, such as a child that doesn't run, is in the first stage's state dict.
    left = {name: child for name, child in model._modules.items() if name not in used}
    parts[0].update(left)
    modules = [[m for m in part.values() if m is not None] for part in parts]
    if any(tensor.is_meta for tensor in tensors_of(model)):
        own = [*chain.from_iterable(map(tensors_of, modules[group.rank]))]
        own += tied_weights(modules)  # to broadcast them, as any
        if group.rank == 0:
            own += [*model.parameters(recurse=False), *model.buffers(recurse=False)]
        materialize(model, own, run.context.device)
    tied = TiedWeights(modules, group.rank)
    if shared := tied_weights(modules):
        operation = "the broadcast of tied weights"
        broadcast_all(run.context.group("stage", "steps"), [*shared], operation)
    norms = (m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    if run.leads and next(norms, None) is not None:
        report(BATCH_NORM)
    pipeline = Pipeline(
        run=run,
        replica=replica,
        twin=twin,
        tied=tied,
        schedule=schedule,
        options=options,
    )
    stage = Stage(parts[group.rank], runs, glue, pipeline, keys)
    if group.rank == 0:  # what the model has itself
        stage._parameters.update(model._parameters)
        stage._buffers.update(model._buffers)
        stage._non_persistent_buffers_set.update(model._non_persistent_buffers_set)
    if group.size > 1:
        count_once(stage, run, "stage", tied.counted)
    return stage.train(model.training)


def _refuse_divided(model: nn.Module) -> None:
    if any(map(wholes_of, model.modules())):
        raise ConfigError(
            "paceline.tensor_parallel() has divided the model's layers, of which a stage would not "
            f"know: call {CALL} first, and then paceline.tensor_parallel() of what it returns."
        )


def _refuse_lazy(model: nn.Module) -> None:
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise ConfigError(
                f"{name} is uninitialised (lazy): run one batch through the model before {CALL}, "
                "inside `with paceline.deferred_init():` where the model is built there."
            )


def _require(cuts: Sequence[str] | None, paths: Sequence[str], stages: int) -> None:
    """Require that there are as many cuts, and blocks enough, as the mesh has stages."""
    given = f"the mesh has {many(stages, 'stage')}"
    if len(paths) < stages:
        raise ConfigError(
            f"{given}, but the model has {many(len(paths), 'block')}: use fewer stages, or a model "
            "whose blocks are divided further."
        )
    if cuts is None:
        return
    named = not isinstance(cuts, str) and all(isinstance(cut, str) for cut in cuts)
    if not named or len(cuts) != stages - 1:
        raise ConfigError(
            f"cuts is {cuts!r}, but {given}: give a list of the {many(stages - 1, 'block')} at "
            "which the stages but the first begin, each by its name, or leave it out."
        )


def _require_parameters(parts: Sequence[Mapping[str, nn.Module | None]]) -> None:
    for number, part in enumerate(parts):
        if not any(True for m in part.values() if m is not None for _ in m.parameters()):
            raise ConfigError(
                f"stage {number} has {', '.join(part)}, which has no parameters to train: cut the "
                "model so that each stage has some."
            )


def _require_apart(
    model: nn.Module, parts: Sequence[Mapping[str, nn.Module | None]], paths: Sequence[str]
) -> None:
    """Require that what is taken apart has no hooks, and that stages share no statistics."""
    numbers: dict[nn.Module, set[int]] = {}
    for number, part in enumerate(parts):
        for child in part.values():
            for module in child.modules() if child is not None else ():
                numbers.setdefault(module, set()).add(number)
    for path, module in model.named_modules():
        if len(numbers.get(module, ())) > 1 and isinstance(module, nn.modules.batchnorm._BatchNorm):
            stages = " and ".join(map(str, sorted(numbers[module])))
            raise ConfigError(
                f"stages {stages} have the BatchNorm {path}, of whose running statistics each "
                "would update a copy: give each place of the model one of its own, or cut the "
                "model so that one stage has all of them."
            )
        inside = not path or any(one != path and is_inside(one, path) for one in paths)
        hooks = (getattr(module, f"_{name}_hooks") for name in _HOOKS)
        if inside and module not in numbers and any(hooks):
            named = f"the model's {path}" if path else "the model"
            raise ConfigError(
                f"{named} has a hook of its forward or backward pass, which would not run: the "
                f"stages call its blocks. Register it on the blocks, or on what {CALL} returns."
            )
