"""The trainer of a run, made from the run's configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from paceline.cluster.membership.protocol import Membership
from paceline.config.average import require_merge
from paceline.config.run import OutputConfig
from paceline.config.train import TrainConfig
from paceline.data.source import Source
from paceline.generation.run import Run
from paceline.observe.loss_watch import LossWatch
from paceline.observe.score_counter import BATCH_SUMS
from paceline.replica.replica import Replica
from paceline.run.autotune.autotuner import TrialSetting
from paceline.run.batches import Batches
from paceline.run.decode_trial import DecodeTrial
from paceline.run.learning_rate import LearningRate
from paceline.run.precision import Precision
from paceline.run.small_slices import SmallSlices
from paceline.run.steps import Steps
from paceline.run.worker_speeds import WorkerSpeeds
from paceline.session.decoding import Decoding
from paceline.session.resume.durable_start import DurableStart
from paceline.session.resume.edits import GIVEN, GivenHyperparameters, edited_flags
from paceline.session.resume.start import Start
from paceline.snapshots.backup import SnapshotBackup
from paceline.snapshots.checkpoint_restore import restore_checkpoint
from paceline.snapshots.durable_files import DurableFiles
from paceline.snapshots.objects import StateObjects
from paceline.snapshots.position import Position
from paceline.snapshots.schedule import SavePolicy
from paceline.snapshots.step_snapshots import StepSnapshots
from paceline.state.checkpoint_files import FOLDER, Checkpoints
from paceline.state.checkpoint_writer import CheckpointWriter
from paceline.state.weights import save_epoch
from paceline.trainer import Trainer
from paceline.update.batch_norm import BatchShare, SyncBatchNorm
from paceline.update.outer.average import average_from_flags
from paceline.wiring.average import average_weights
from paceline.wiring.exchange import replicate
from paceline.wiring.model import make_model, make_optimizer
from paceline.wiring.sources import Databases, order_of

_NO_HYPERPARAMETERS = ("batch_size", "max_loss", "max_loss_at")  # the batch size can't be edited


def build_trainer(
    config: TrainConfig,
    run: Run,
    sources: Databases,
    device: torch.device,
    folder: Path,
    start: Start | None = None,
    stopping: Callable[[], bool] = lambda: False,
    agree: Callable[[nn.Module], None] = lambda model: None,
) -> Trainer:
    """Make the model and everything around it; collective, as rank 0's weights are sent to all.

    Args:
        config: the run's configuration.
        run: the run, whose recorder receives what happens.
        sources: the records.
        device: this rank's.
        folder: the run's.
        start: where the run starts; by default at its beginning.
        stopping: returns whether this process was asked to stop.
        agree: compares the model with the other ranks', before anything of it is exchanged.

    Raises:
        ConfigError: model, weights or checkpoint can't be had as asked for.
    """
    optim = config.optim
    start = start or Start()
    order = order_of(config, len(sources.train))
    start.check_order(order, sources.train.fingerprint)
    average = average_from_flags(config.sync.sync, config.average)
    if average is not None:
        require_merge(average.every, optim.num_epochs * order.steps)
    recorder = run.recorder
    torch.manual_seed(optim.seed)
    share = BatchShare()
    weights_file = config.model.load_model_path if start.state is None else ""
    new_model = partial(
        make_model,
        replace(config, model=replace(config.model, load_model_path=weights_file)),
        device,
        run,
    )
    model = new_model(share, lambda note: recorder.event("note", text=note))
    agree(model)
    if any(isinstance(m, SyncBatchNorm) for m in model.modules()):
        run.open("data", "layers")
    position = start.position
    decoding = Decoding(config, run, device, position.decode_device)
    resources = ExitStack()
    resources.callback(decoding.close)
    trial = DecodeTrial(run, position, decoding.present) if decoding.tries else None
    speeds = WorkerSpeeds(
        run,
        position,
        measured=config.sync.shares == "measured",
        report=lambda note: recorder.event("note", text=str(note)),
    )
    speeds.batch_size = config.global_batch
    batches = partial(
        Batches,
        run=run,
        speeds=speeds,
        epochs=optim.num_epochs,
        decoding=decoding.pool,
        decode_device=decoding.present,
        trial=trial,
    )
    remedies = ("choose another --batch_size or --epoch_size", "add --sync_bn")
    small = SmallSlices(run, position, remedies)
    train = batches(loader=decoding.loader(sources.train, train=True), trains=True, small=small)
    test = None
    if sources.test is not None:
        test = batches(loader=decoding.loader(sources.test, train=False), trains=False)
    optimizer = make_optimizer(model, optim, config.global_batch)
    rate = LearningRate(
        policy=optim.lr_policy,
        steps_per_epoch=train.steps,
        epochs=optim.num_epochs,
        warmup_epochs=optim.warmup_epochs,
    )
    start.given.add_optimizer("optimizer", optimizer, model)
    schedule = LambdaLR(optimizer, rate)
    start.given.add_object("schedule", schedule)
    new_precision = partial(
        Precision,
        config.model.dtype,
        device,
        clip_norm=optim.clip_norm,
        clip_value=optim.clip_value,
    )
    precision = new_precision()
    parts: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "precision": precision,
    }
    new_rate = replace(rate)  # `rate` is a checkpoint's once that is restored
    start.restore(parts)
    _set_rates(schedule)
    for edit in edits_of(config, start):
        recorder.event("note", text=edit)
    setting = TrialSetting(
        folder=folder,
        steps=optim.num_epochs * train.steps - position.number,
        report=lambda note: recorder.event("note", text=str(note)),
    )
    replica: Replica
    if average is None:
        sync = start.keep_bucket_size(config.sync)
        replica = replicate(model, optimizer, run, sync, share, setting)
    else:
        steps_of_run = optim.num_epochs * train.steps
        replica = average_weights(model, optimizer, run, config.sync, average, steps_of_run)
        longest = max(h for first, h in average.phases if first < steps_of_run)
        if longest > train.steps:
            recorder.event(
                "note",
                text=f"--average_every {longest} is more than the {train.steps} steps of an epoch: "
                "an epoch without a merge is evaluated and saved with the weights of the last "
                f"merge before it. Give at most {train.steps} for a merge in each epoch.",
            )
    replica.follow(precision.scale)
    for note in start.restore_exchange(replica):
        recorder.event("note", text=note)

    def save(best: bool) -> None:
        if run.leads:
            save_epoch(folder, config.model.weights_name, model, best=best)

    output = config.output
    backup = None
    files = None
    if run.membership.survives:
        backup = SnapshotBackup(run.membership)
        resources.callback(backup.close)
        files = DurableFiles(run.membership.frames, backup, folder)
    writer = make_writer(config, folder, sources.train, start.given, run.membership, files)
    snapshots = _snapshots_of(run, replica, parts, output, position, backup)

    def restore(entries: Mapping[str, Any]) -> None:
        restore_checkpoint(entries, snapshots.objects)
        _set_rates(schedule)

    def beginning() -> Mapping[str, Any]:
        torch.manual_seed(optim.seed)
        first = new_model(BatchShare(), lambda note: None)
        plain = make_optimizer(first, optim, config.global_batch)
        return {
            "model": first.state_dict(),
            "optimizer": plain.state_dict(),
            "schedule": LambdaLR(plain, new_rate).state_dict(),
            "precision": new_precision().state_dict(),
            "position": asdict(Position()),
        }

    durable = DurableStart(
        run,
        folder,
        output,
        config.identity(),
        given=start.given,
        restore=restore,
        replicas=lambda: [replica],
        report=lambda sentence: recorder.event("note", text=sentence),
        beginning=beginning if start.state is None else None,
    )
    steps = Steps(
        replica,
        run,
        writer,
        seed=optim.seed,
        position=position,
        policy=SavePolicy(steps=output.checkpoint_steps, minutes=output.checkpoint_minutes),
        stopping=stopping,
        check_sums=watch_of(config, run, folder, train.steps).check,
        value_count=BATCH_SUMS + 1,
        device=device,
        snapshots=snapshots,
        durable=durable,
        speeds=speeds if average is None and device.type == "cpu" else None,  # of exact steps
    )
    return Trainer(
        model=model,
        criterion=nn.CrossEntropyLoss(label_smoothing=optim.label_smoothing),
        optimizer=optimizer,
        schedule=schedule,
        precision=precision,
        replica=replica,
        steps=steps,
        device=device,
        resources=resources,
        train=train,
        test=test,
        save=save,
        small=small,
        epochs=optim.num_epochs,
        num_labels=config.data.num_labels,
    )


def _snapshots_of(
    run: Run,
    replica: Replica,
    parts: Mapping[str, Any],
    output: OutputConfig,
    position: Position,
    backup: SnapshotBackup | None,
) -> StepSnapshots:
    tracked = {name: part for name, part in parts.items() if name not in ("model", "optimizer")}
    objects = StateObjects(model=parts["model"], optimizer=parts["optimizer"], tracked=tracked)
    return StepSnapshots(
        run,
        replica,
        objects,
        enabled=output.snapshots,
        interval=position.snapshot_interval,
        limit_mb=output.snapshot_memory_mb,
        check=output.replica_check,
        backup=backup,
        report=lambda note: run.recorder.event("note", text=str(note)),
    )


def edits_of(config: TrainConfig, start: Start) -> list[str]:
    """Return notes on flags of the optimisation that replace those of the checkpoint."""
    if start.state is None:
        return []
    flags = {k: v for k, v in asdict(config.optim).items() if k not in _NO_HYPERPARAMETERS}
    edited = edited_flags(start.state.get("config", {}), flags)
    texts = [f"{', '.join(edited)}."] if edited else []
    if start.given.resets(start.state):
        texts.append("The optimizer's state begins anew, because of --reset_optimizer.")
    return texts


def make_writer(
    config: TrainConfig,
    folder: Path,
    source: Source,
    given: GivenHyperparameters,
    membership: Membership,
    files: DurableFiles | None,
) -> CheckpointWriter:
    """Make what writes checkpoints, with the data's order and fingerprint, into `folder`."""
    checkpoints = Checkpoints(folder, config.output.keep_checkpoints)
    order = asdict(order_of(config, len(source)))
    constant = {"config": config.identity(), "order": order, "data": source.fingerprint}
    constant[GIVEN] = given.entries
    return CheckpointWriter(checkpoints, constant=constant, membership=membership, files=files)


def watch_of(config: TrainConfig, run: Run, folder: Path, steps: int) -> LossWatch:
    """Make the watch that records the losses and stops a run that diverges; epochs have `steps`."""
    remedy = (
        "Use a smaller --base_learning_rate or add --warmup_epochs; the checkpoints in "
        f"{folder / FOLDER} are valid."
    )
    return LossWatch(
        run,
        max_loss=config.optim.max_loss,
        remedy=remedy,
        every=steps if config.optim.max_loss_at == "epoch" else 1,
    )


def _set_rates(schedule: LambdaLR) -> None:
    """Set the learning rates of the present step, which edited flags may have changed."""
    factors = [rate(schedule.last_epoch) for rate in schedule.lr_lambdas]
    pairs = zip(schedule.base_lrs, factors, strict=True)
    schedule._last_lr = [base * factor for base, factor in pairs]
    for group, value in zip(schedule.optimizer.param_groups, schedule._last_lr, strict=True):
        group["lr"] = value
