"""Makes the model and the optimizer (SGD) of `paceline train`; how it updates: `update/`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from paceline.config.model import ModelConfig
from paceline.config.optim import OptimConfig
from paceline.config.train import TrainConfig
from paceline.errors import ConfigError
from paceline.generation.run import Run
from paceline.models.compiled_blocks import blocks
from paceline.models.weight_decay import decay_groups
from paceline.models.zoo import build_model
from paceline.replica.compiled_modules import compile_blocks
from paceline.run.learning_rate import base_rate
from paceline.run.precision import capabilities_of, computes_bfloat16
from paceline.state.weights import load_weights
from paceline.update.batch_norm import (
    BatchShare,
    batch_norms,
    convert_sync_batchnorm,
    synchronised_note,
)

_KINDS = {"cpu": "processor", "cuda": "GPU"}


def make_model(
    config: TrainConfig,
    device: torch.device,
    run: Run | None = None,
    share: BatchShare | None = None,
    report: Callable[[str], object] = lambda note: None,
) -> nn.Module:
    """Make the model on its device, from torch's random seed or from given weights.

    Args:
        config: names the model.
        device: where it computes.
        run: the run, whose ranks the layers connect that --sync_bn replaces, or that are torch's
            `SyncBatchNorm`; None: none is replaced.
        share: this rank's share of each step; the replica's.
        report: receives sentences about weights that are skipped, and about such layers.

    Raises:
        ConfigError: model or weights can't be had as asked for, or the device emulates --dtype.
    """
    refuse_emulation(config.model, device.type, capabilities_of(device))
    data = config.data
    model = build_model(
        config.model.name, num_labels=data.num_labels, num_channels=data.num_channels
    )
    if config.model.load_model_path:
        for note in load_weights(Path(config.model.load_model_path), model):
            report(note)
    layout = torch.channels_last if config.model.channels_last else torch.contiguous_format
    model.to(device=device, memory_format=layout)  # type: ignore[call-overload]
    if run is not None and share is not None:
        model = _synchronise(model, config, run, share, report)
    if config.model.compile:
        compile_blocks(blocks(model))
    return model


def _synchronise(
    model: nn.Module,
    config: TrainConfig,
    run: Run,
    share: BatchShare,
    report: Callable[[str], object],
) -> nn.Module:
    every = config.model.sync_bn
    names = batch_norms(model, every=every, averaged=config.sync.sync == "average")
    if names and not every:
        report(synchronised_note(names))
    return convert_sync_batchnorm(model, run, share, every=every)


def refuse_emulation(model: ModelConfig, kind: str, capabilities: Mapping[str, object]) -> None:
    """Refuse bfloat16 on a device that emulates it.

    Args:
        model: asks for it, or insists on it.
        kind: the device's, "cpu" or "cuda".
        capabilities: of the device, as in `computes_bfloat16`.

    Raises:
        ConfigError: it only emulates it, and --force_bfloat16 isn't given.
    """
    wanted = model.dtype == "bfloat16" and not model.force_bfloat16
    if wanted and not computes_bfloat16(capabilities):
        raise ConfigError(
            f"--dtype bfloat16: this {_KINDS.get(kind, kind)} has no bfloat16 instructions, so "
            "bfloat16 would be emulated and slower than float. Remove --dtype, or add "
            "--force_bfloat16."
        )


def make_optimizer(model: nn.Module, optim: OptimConfig, global_batch: int) -> Optimizer:
    """Make SGD with Nesterov momentum, with weight decay where it belongs.

    Raises:
        ConfigError: the model has no parameter that can be trained.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            "The model has no parameter with requires_grad=True, so there is nothing to train: "
            "unfreeze some parameters."
        )
    return SGD(
        decay_groups(model, optim.weight_decay, norm_scale=not optim.no_bn_decay),
        lr=base_rate(optim.base_learning_rate, global_batch, scale=optim.scale_lr),
        momentum=optim.momentum,
        nesterov=optim.momentum > 0,
    )
