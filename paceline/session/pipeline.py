"""Pipeline of `paceline train`: cuts the model, and makes what trains this rank's stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from paceline.config.train import TrainConfig
from paceline.errors import ConfigError
from paceline.parallel.cutting import cut_model
from paceline.parallel.pipeline import PipelineOptions
from paceline.run.precision import Precision
from paceline.run.staged_pass import StagedPass
from paceline.session.session import Session
from paceline.update.batch_norm import SyncBatchNorm


def cut(
    model: nn.Module,
    config: TrainConfig,
    session: Session,
    criterion: nn.Module,
    precision: Precision,
) -> StagedPass:
    """Cut the model, and make what trains this rank's stage of it; collective.

    Raises:
        ConfigError: the model can't be cut as asked for.
    """
    if any(isinstance(module, SyncBatchNorm) for module in model.modules()):
        raise ConfigError(
            "the model has SyncBatchNorm layers, whose statistics are of the whole batch, but "
            "stages train microbatches: use BatchNorm, or leave out --stages and --microbatches."
        )
    pipeline = config.pipeline
    group = session.run.context.along("stage")
    staged = StagedPass(
        criterion=criterion,
        precision=precision,
        num_labels=config.data.num_labels,
        microbatches=pipeline.microbatch_count,
        counts=group.rank == group.size - 1,
    )
    options = PipelineOptions(
        loss=staged.loss,
        microbatches=pipeline.microbatch_count,
        cuts=pipeline.cut_names or None,
        schedule=pipeline.schedule,
        example=_example(config, session),
        checkpoint_activations=pipeline.checkpoint_activations,
        spelled=_as_flag,
    )
    staged.stage = cut_model(
        model, session.run, staged, options, report=session.run.note, folder=session.folder
    )
    return staged


def _example(config: TrainConfig, session: Session) -> torch.Tensor:
    """Return a replica's share of a batch: one image, repeated without its memory."""
    size = config.data.image_size
    image = torch.zeros(1, config.data.num_channels, size, size, device=session.device)
    share = -(-config.global_batch // session.run.context.along("data").size)
    return image.expand(share, -1, -1, -1)


def _as_flag(cuts: Sequence[str]) -> str:
    return f"--cuts {','.join(cuts)}"
