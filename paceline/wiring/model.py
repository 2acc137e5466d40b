"""Makes the model and the optimizer of `paceline train`; how it updates: `update/`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.algorithms.served.served_optimizer import SERVED
from paceline.config.model import ModelConfig
from paceline.config.optim import OptimConfig
from paceline.config.pipeline import PipelineConfig
from paceline.config.train import TrainConfig
from paceline.config.world import SyncConfig
from paceline.errors import ConfigError, user_named_file
from paceline.generation.run import Run
from paceline.models.compiled_blocks import blocks
from paceline.models.frozen import freeze
from paceline.models.other_zoos import pretrained_weights, zoo_of
from paceline.models.weight_decay import decay_groups
from paceline.models.zoo import MODELS, build_model, model_factory
from paceline.replica.compiled_modules import compile_blocks
from paceline.run.learning_rate import base_rate
from paceline.run.precision import capabilities_of, computes_bfloat16
from paceline.state.weights import check_weights, install_weights, load_weights
from paceline.update.batch_norm import (
    BatchShare,
    batch_norms,
    convert_sync_batchnorm,
    synchronised_note,
)
from paceline.update.divided_optimizer import require_divisible
from paceline.update.named_optimizers import make_named_optimizer, probe, usual_rate
from paceline.update.shard_optimizer import SHARDED
from paceline.update.updater import is_bucketwise

_FAR = 5  # times an optimizer's own learning rate
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
        ConfigError: model or weights can't be had as asked for, a pattern of --freeze matches
            nothing, or the device emulates --dtype.
    """
    refuse_emulation(config.model, device.type, capabilities_of(device))
    data = config.data
    model = build_model(
        config.model.name, num_labels=data.num_labels, num_channels=data.num_channels
    )
    for note in _initialise(model, config.model):
        report(note)
    if note := freeze(model, config.model.freeze):
        report(note)
    layout = torch.channels_last if config.model.channels_last else torch.contiguous_format
    model.to(device=device, memory_format=layout)  # type: ignore[call-overload]
    if run is not None and share is not None:
        model = _synchronise(model, config, run, share, report)
    if config.model.compile:
        compile_blocks(blocks(model))
    return model


def _initialise(model: nn.Module, config: ModelConfig) -> tuple[str, ...]:
    """Copy the given weights, of a file or published ones, into the model; return sentences."""
    given = config.load_model_path
    if not given:
        return ()
    if not Path(given).exists() and (found := pretrained_weights(config.name, given)) is not None:
        given = f"{config.name} ({given})"
        notes = install_weights(found, model, source=given)
    else:
        with user_named_file():
            notes = load_weights(Path(given), model)
    return notes or (f"{given}: the model begins with all of its weights.",)


def check_model(config: TrainConfig) -> None:
    """Check what can be known of a model without its memory: a user's own is only found.

    Raises:
        CheckpointError: the file of weights is torn or something else.
        ConfigError: there is no such model; a pattern of --freeze matches none of its parameters,
            or the optimizer doesn't take them.
    """
    name = config.model.name
    offered = {"num_labels": config.data.num_labels, "num_channels": config.data.num_channels}
    model_factory(name, **offered)
    given = config.model.load_model_path
    other = zoo_of(name)
    if given and not Path(given).exists() and other is not None:
        known = other[0].weights_of(other[1])
        if given not in known:
            raise ConfigError(
                flag="weights",
                value=given,
                rule=f"is neither a file nor published weights of {name}",
                remedy=f"these are {', '.join(known)}",
            )
    elif given:
        with user_named_file():
            check_weights(Path(given))
    plain = config.optim.optimizer == OptimConfig.optimizer and not config.model.freeze
    if plain or (name not in MODELS and other is None):
        return
    with torch.device("meta"):
        model = build_model(name, **offered)
    freeze(model, config.model.freeze)
    make_optimizer(model, config.optim, config.global_batch)


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
    """Make the optimizer (SGD has Nesterov momentum), with weight decay where it belongs.

    Raises:
        ConfigError: the model has no parameter that can be trained; or there is no such optimizer,
            or it doesn't take these options or parameters.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            "The model has no parameter with requires_grad=True, so there is nothing to train: "
            "unfreeze some parameters."
        )
    groups = decay_groups(model, optim.weight_decay, norm_scale=not optim.no_bn_decay)
    rate = base_rate(optim.base_learning_rate, global_batch, scale=optim.scale_lr)
    return make_named_optimizer(
        optim.optimizer, groups, optim.optimizer_options, lr=rate, **_momentum(optim)
    )


def check_optimizer(optim: OptimConfig, sync: SyncConfig, pipeline: PipelineConfig) -> list[str]:
    """Check that there is such an optimizer, with these options, and that an exchange divides it.

    Returns:
        sentences for the user.

    Raises:
        ConfigError: there is none, it can't make a step, or its update needs whole layers, or the
            whole model, where the state is divided.
    """
    name = optim.optimizer
    if name == OptimConfig.optimizer and not optim.optimizer_options:
        # Nothing refuses it, and a process's first optimizer takes 2 s: it imports torch._dynamo.
        return []
    given = optim.base_learning_rate
    optimizer = probe(name, optim.optimizer_options, lr=given, **_momentum(optim))
    if sync.update == "sharded" or sync.narrow:
        require_divisible(optimizer, SHARDED)
    if sync.sync == "server":
        require_divisible(optimizer, SERVED)
    if pipeline.active and not is_bucketwise(optimizer):
        raise ConfigError(
            flag="optimizer",
            value=name,
            rule="with --stages, a rank has a part of the model, and this optimizer isn't known to "
            "update each parameter by itself",
            remedy="use sgd, adamw or another one of torch's",
        )
    usual = usual_rate(name)
    chosen = given != OptimConfig.base_learning_rate or name == OptimConfig.optimizer
    if chosen or usual is None or given <= _FAR * usual:
        return []
    return [
        f"--base_learning_rate {given:g} is {given / usual:,.0f} times the default of {name}, "
        f"{usual:g}: give the rate that you want."
    ]


def _momentum(optim: OptimConfig) -> dict[str, object]:
    """Return the options that SGD has by flags of its own.

    Raises:
        ConfigError: momentum was given for another optimizer.
    """
    if optim.optimizer == OptimConfig.optimizer:
        return {"momentum": optim.momentum, "nesterov": optim.momentum > 0}
    if optim.momentum != OptimConfig.momentum:
        raise ConfigError(
            flag="momentum",
            value=optim.momentum,
            rule=f"is of --optimizer sgd, and this run has {optim.optimizer}",
            remedy="give its own options with --optimizer_options",
        )
    return {}
