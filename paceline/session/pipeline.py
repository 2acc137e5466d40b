"""Pipeline of `paceline train`: where the model is cut, and this rank's stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from paceline.config.train import TrainConfig
from paceline.errors import ConfigError
from paceline.generation.run import Run
from paceline.parallel.cutting import choose_cuts, cut_model
from paceline.run.precision import Precision
from paceline.run.staged_pass import StagedPass
from paceline.session.session import Session
from paceline.update.batch_norm import SyncBatchNorm

CUTS = "cuts"  # the entry of a checkpoint


def cuts_of(config: TrainConfig, session: Session, model: nn.Module) -> Sequence[str]:
    """Return where the stages but the first begin: as given, as before, or chosen; collective."""
    pipeline = config.pipeline
    given = pipeline.cut_names or (session.start.state or {}).get(CUTS)
    if given or pipeline.stages == 1:
        return given or ()
    run = session.run
    data = config.data
    share = -(-config.global_batch // run.context.along("data").size)
    example = torch.zeros(
        -(-share // pipeline.microbatch_count),
        data.num_channels,
        data.image_size,
        data.image_size,
        device=session.device,
    )
    cuts, figures = choose_cuts(model, run, 1, example)
    if figures:
        names = ",".join(cuts)
        run.note(f"{figures}. Pin this choice with --cuts {names}; a run that resumes keeps it.")
    return cuts


def cut(
    model: nn.Module,
    cuts: Sequence[str],
    config: TrainConfig,
    run: Run,
    criterion: nn.Module,
    precision: Precision,
) -> StagedPass:
    """Cut the model, and make what trains this rank's stage of it; collective.

    Raises:
        ConfigError: the model can't be cut so.
    """
    pipeline = config.pipeline
    if any(isinstance(module, SyncBatchNorm) for module in model.modules()):
        raise ConfigError(
            "the model has SyncBatchNorm layers, whose statistics are of the whole batch, but "
            "stages train microbatches: use BatchNorm, or leave out --stages and --microbatches."
        )
    group = run.context.along("stage")
    staged = StagedPass(
        criterion=criterion,
        precision=precision,
        num_labels=config.data.num_labels,
        microbatches=pipeline.microbatch_count,
        counts=group.rank == group.size - 1,
    )
    staged.stage = cut_model(
        model,
        run,
        staged,
        loss=staged.loss,
        microbatches=pipeline.microbatch_count,
        cuts=cuts,
        schedule=pipeline.schedule,
        checkpoint_activations=pipeline.checkpoint_activations,
        report=run.note,
    )
    return staged
