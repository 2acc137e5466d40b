"""Checks of the flags of a pipeline: what can be known before anything is written."""

from __future__ import annotations

from dataclasses import replace

import torch

from paceline.cluster.membership.generation import Group
from paceline.config.train import TrainConfig
from paceline.errors import ConfigError, Message, many
from paceline.models.zoo import MODELS, build_model
from paceline.parallel.blocks import block_paths, cut_paths
from paceline.parallel.schedules import make_schedule


def check_stages(config: TrainConfig) -> None:
    """Check the flags of a pipeline, on one machine.

    Raises:
        ConfigError: the stages don't divide the workers, there are fewer microbatches than stages,
            another flag doesn't go with stages, or a model of the zoo can't be cut so.
    """
    pipeline = config.pipeline
    if not pipeline.active:
        return
    if config.world.num_shards == 1:  # else known once all machines have said their workers
        _require_replicas(pipeline.stages, config.world.workers)
    make_schedule(pipeline.schedule, pipeline.stages, pipeline.microbatch_count)
    _refuse_others(config)
    if config.model.name not in MODELS:
        return  # a user's own is made, and checked, by the workers alone
    data = config.data
    with torch.device("meta"):
        model = build_model(
            config.model.name, num_labels=data.num_labels, num_channels=data.num_channels
        )
    paths = block_paths(model)
    if pipeline.stages > len(paths):
        raise ConfigError(
            flag="stages",
            value=pipeline.stages,
            rule=f"{config.model.name} has {many(len(paths), 'block')}, and a stage has at least "
            "one",
            remedy="use fewer stages",
        )
    cut_paths(paths, pipeline.cut_names)


def in_stages(group: Group, stages: int) -> Group:
    """Return the ranks of a start with replicas of so many stages.

    Raises:
        ConfigError: the stages don't divide the ranks.
    """
    _require_replicas(stages, group.generation.world_size)
    return replace(group, generation=replace(group.generation, stages=stages))


def _require_replicas(stages: int, workers: int) -> None:
    if workers % stages:
        more = -(-workers // stages) * stages
        raise ConfigError(
            flag="stages",
            value=stages,
            rule=f"each stage has a worker of its own, and {many(stages, 'stage')} don't divide "
            f"{many(workers, 'worker')}",
            remedy=Message(f"start {more}, with {{--num_workers}} or {{--num_gpus}}"),
        )


def _refuse_others(config: TrainConfig) -> None:
    """Refuse flags that need the whole model, or the whole batch at once."""
    stages = config.pipeline.stages
    given = f"--stages {stages}" if stages > 1 else "--microbatches"
    reasons = {
        "sync_bn": "BatchNorm's statistics are those of each microbatch",
        "ema": "a stage has no part of the average",
        "mixup": "stages compute the loss of plain labels",
        "freeze": "a stage may have no parameter that is trained",
        "compile": "a stage runs blocks that aren't compiled",
        "dtype": "loss scaling needs the whole model's gradients at once",
        "sync": "each of its workers trains the whole model",
        "param_dtype": "stages have float32 parameters",
    }
    values = {
        "sync_bn": config.model.sync_bn,
        "ema": config.optim.ema,
        "mixup": config.optim.mixup,
        "freeze": " ".join(config.model.freeze),
        "compile": config.model.compile,
        "dtype": config.model.dtype if config.model.dtype == "float16" else "",
        "sync": config.sync.sync if config.sync.sync in ("average", "server") else "",
        "param_dtype": config.sync.param_dtype if config.sync.narrow else "",
    }
    remedies = {"dtype": "use bfloat16 or float", "sync": "use allreduce, notified or auto"}
    for flag, value in values.items():
        if value:
            raise ConfigError(
                flag=flag,
                value="" if value is True else value,
                rule=f"doesn't go with {given}: {reasons[flag]}",
                remedy=remedies.get(flag, "leave it out"),
            )
