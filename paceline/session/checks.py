"""Checks of a configuration, before anything is written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from paceline.codecs.merge_codecs import merge_codec
from paceline.comm.nixl.agent import require_nixl
from paceline.comm.shared_gpus import sharing_ranks
from paceline.config.data import DataConfig
from paceline.config.train import TrainConfig
from paceline.data.mixup import MOST_LABELS
from paceline.errors import ConfigError, Message, many
from paceline.observe.trackers.trackers import require_installed
from paceline.replica.compiled_modules import check_compiler
from paceline.run.precision import capabilities_of
from paceline.server.found_servers import refuse_server
from paceline.session.decoding import no_gpu
from paceline.session.exchange_checks import check_narrow, check_shares, refuse_gpu, refuse_stale
from paceline.session.resume.start import check_order, check_origin
from paceline.session.sources import Databases, labels_beyond, open_sources, order_of
from paceline.session.stage_checks import check_stages
from paceline.update.outer.average import average_from_flags
from paceline.wiring.connections import refuse_shared_gpu
from paceline.wiring.model import check_model, check_optimizer, refuse_emulation


def check(config: TrainConfig, gpus: int) -> list[str]:
    """Check what can be known before anything is written, on a machine with `gpus` GPUs.

    Returns:
        sentences for the user.

    Raises:
        ConfigError: a path, a label, a model, a number of samples or of GPUs, shares by speed for
            one worker, an emulated dtype, no compiler for --compile, no NIXL for --transport, no
            package for --tracker, a pipeline that the model or another flag doesn't allow, an
            exchange that GPUs don't have, no GPU to decode on, no test data for --patience, or a
            checkpoint of other data or batches.
        DataError: not a database, or one of unknown records.
        CheckpointError: the file of weights, or the checkpoint of --resume, is torn or something
            else.
    """
    world = config.world
    wanted = max(world.gpu_numbers, default=world.workers - 1)
    if gpus and not world.use_cpu and wanted >= gpus:
        raise ConfigError(
            f"GPU {wanted} does not exist: this machine has {gpus}, numbered from 0. Request fewer "
            "with --gpus or --num_gpus, or use CPUs with --use_cpu."
        )
    for flag in ("target_accuracy", "patience"):
        value = getattr(config.optim, flag)
        if value and not config.data.test_data:
            rule = "the run is never evaluated"
            raise ConfigError(
                flag=flag, value=value, rule=rule, remedy=Message("add {--test_data}")
            )
    on_cpu = world.use_cpu or not gpus
    if not on_cpu:
        refuse_gpu(config.sync)
        refuse_shared_gpu(sharing_ranks(list(map(str, world.gpu_numbers))), config.sync.sync)
    check_narrow(config.sync, config.model.dtype)
    check_stages(config)
    notes = check_optimizer(config.optim, config.sync, config.pipeline)
    check_shares(config.sync, world.workers * world.num_shards // config.pipeline.stages)
    refuse_stale(
        config.sync,
        {
            "sync_bn": config.model.sync_bn,
            "ema": config.optim.ema,
            "clip_norm": config.optim.clip_norm,
            "clip_value": config.optim.clip_value,
            "dtype": config.model.dtype if config.model.dtype == "float16" else "",
        },
    )
    average = average_from_flags(config.sync.sync, config.average)
    if average is not None:
        merge_codec(config.sync.wire)
        refuse_server(config.sync, average)
    if average is not None and config.model.sync_bn:
        raise ConfigError(
            Message(
                "{--sync_bn} was given with {--sync} average, where workers compute apart: leave "
                "it out; running statistics are averaged with the weights."
            )
        )
    if config.optim.ema and (average is not None or config.sync.narrow):
        given = "--sync average" if average is not None else "--param_dtype"
        reason = "workers have different weights" if average is not None else "weights have 16 bits"
        raise ConfigError(
            flag="ema",
            value=config.optim.ema,
            rule=f"doesn't go with {given}, where {reason}",
            remedy="leave one of them out",
        )
    if config.optim.mixup:
        _check_mixup(config)
    if config.sync.transport == "nixl":
        require_nixl()
    if on_cpu:  # a GPU is checked by its worker: a check makes its context
        refuse_emulation(config.model, "cpu", capabilities_of(torch.device("cpu")))
    if config.data.decode_device == "cuda" and on_cpu:
        raise no_gpu("cuda")
    if config.model.compile and on_cpu:
        check_compiler()
    run = Path(config.output.output_dir, world.run_id)
    if world.shard_id == 0:  # rank 0's machine
        check_origin(config.output, run)
        require_installed(config.output.trackers)
    check_model(config)
    sources = open_sources(config)
    sources.close()
    if world.shard_id == 0:
        check_order(
            config.output,
            run,
            order_of(config, len(sources.train)),
            sources.train.fingerprint,
        )
    return [*notes, *_notes(config, sources)]


def _check_mixup(config: TrainConfig) -> None:
    rule = ""
    if config.data.decode_device != "cpu":
        rule = f"doesn't go with --decode_device {config.data.decode_device}: processes mix images"
    elif config.data.num_labels > MOST_LABELS:
        rule = f"takes at most {MOST_LABELS:,} classes"
    if rule:
        value = config.optim.mixup
        raise ConfigError(flag="mixup", value=value, rule=rule, remedy="leave one of them out")


def _notes(config: TrainConfig, sources: Databases) -> Iterator[str]:
    for source in (sources.train, sources.test):
        if source is not None and source.index_note:
            yield source.index_note
    wanted = config.data.num_labels
    for source in (sources.train, sources.test):
        if source is not None and (beyond := labels_beyond(source, wanted)):
            yield (
                f"{beyond} of {len(source)} records have labels beyond --num_labels {wanted} and "
                "are skipped (--bad_records skip)."
            )
    labels = sources.train.labels
    if labels is not None and (classes := labels.max() + 1) < wanted:
        by_default = ", as Caffe2's by default" if wanted == DataConfig.num_labels else ""
        yield (
            f"the training data has {many(int(classes), 'class')}, but the model gets {wanted:,} "
            f"outputs{by_default}; use --num_labels {classes}."
        )
