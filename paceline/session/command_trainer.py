"""The trainer of `paceline train`, made from the run's configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from paceline.cluster.rendezvous.preflight import model_facts
from paceline.config.average import require_merge
from paceline.config.train import TrainConfig
from paceline.config.world import SyncConfig
from paceline.generation.run import Run
from paceline.models.frozen import fixed_norms
from paceline.observe.score_counter import BATCH_SUMS
from paceline.replica.trained_parameters import WHOLE
from paceline.run.batches import Batches
from paceline.run.convergence import Convergence
from paceline.run.decode_trial import DecodeTrial
from paceline.run.extension import Extension
from paceline.run.learning_rate import LearningRate
from paceline.run.loss_watch import LossWatch
from paceline.run.mixup import Mixup
from paceline.run.moving_average import MovingAverage
from paceline.run.precision import Precision
from paceline.run.small_slices import SmallSlices
from paceline.run.staged_pass import StagedPass
from paceline.session.decoding import Decoding
from paceline.session.pipeline import cut
from paceline.session.resume.edits import edited_flags
from paceline.session.resume.start import Start
from paceline.session.session import Session
from paceline.session.sources import Databases, order_of
from paceline.session.training import Training
from paceline.snapshots.position import Position
from paceline.state.weights_about import describe
from paceline.trainer import Trainer
from paceline.update.batch_norm import BatchShare, SyncBatchNorm
from paceline.update.outer.average import Average, average_from_flags
from paceline.wiring.model import make_model, make_optimizer
from paceline.wiring.pairs import Pair


@dataclass(frozen=True, kw_only=True)
class _Recipe:
    """Recipe of what the command trains, for its start and for going back to its beginning.

    Attributes:
        config: the run's configuration, without weights to load where it resumes.
        device: this rank's.
        steps: of an epoch.
        folder: of the run.
    """

    config: TrainConfig
    run: Run
    device: torch.device
    steps: int
    folder: Path

    def model(self, share: BatchShare, report: Callable[[str], object]) -> nn.Module:
        """Make the model, from the run's seed; its SyncBatchNorm layers know the rank's `share`."""
        torch.manual_seed(self.config.optim.seed)
        return make_model(self.config, self.device, self.run, share, report)

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Make the optimizer."""
        return make_optimizer(model, self.config.optim, self.config.global_batch)

    def schedule(self, optimizer: Optimizer) -> LambdaLR:
        """Make the schedule of the learning rate."""
        optim = self.config.optim
        rate = LearningRate(
            policy=optim.lr_policy,
            steps_per_epoch=self.steps,
            epochs=optim.num_epochs,
            warmup_epochs=optim.warmup_epochs,
        )
        return _Schedule(optimizer, rate)

    def extensions(self, model: nn.Module) -> list[Extension]:
        """Make the extensions that are asked for."""
        optim = self.config.optim
        every = self.steps if optim.max_loss_at == "epoch" else 1
        made: list[Extension] = [
            LossWatch(self.run, max_loss=optim.max_loss, every=every, folder=self.folder)
        ]
        if optim.ema:
            made.append(MovingAverage(model, optim.ema))
        if optim.mixup:
            made.append(Mixup(optim.mixup, optim.label_smoothing))
        return made

    def precision(self) -> Precision:
        """Make what computes in the type that is asked for."""
        optim = self.config.optim
        return Precision(
            self.config.model.dtype,
            self.device,
            clip_norm=optim.clip_norm,
            clip_value=optim.clip_value,
        )

    def entries(self) -> Mapping[str, Any]:
        """Make the entries of a checkpoint of the run's beginning, as `Beginning` says."""
        model = self.model(BatchShare(), lambda note: None)
        optimizer = self.optimizer(model)
        return {
            **{k: v.state_dict() for e in self.extensions(model) for k, v in e.entries().items()},
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "schedule": self.schedule(optimizer).state_dict(),
            "precision": self.precision().state_dict(),
            "position": asdict(Position()),
        }


class _Schedule(LambdaLR):
    """Schedule of the learning rate, which edited flags may have changed in its state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state, and set the learning rates of its step."""
        super().load_state_dict(state_dict)
        factors = [rate(self.last_epoch) for rate in self.lr_lambdas]
        self._last_lr = [base * f for base, f in zip(self.base_lrs, factors, strict=True)]
        for group, value in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = value


def build_trainer(config: TrainConfig, session: Session, sources: Databases) -> Trainer:
    """Make the model and everything around it; collective, as rank 0's weights are sent to all.

    Args:
        config: the run's configuration.
        session: connected; it closes what is opened, and makes the steps.
        sources: the records.

    Raises:
        ConfigError: model, weights or checkpoint can't be had as asked for.
    """
    assert session.folder is not None
    start = session.start
    run = session.run
    optim = config.optim
    order = order_of(config, len(sources.train))
    start.check_order(order, sources.train.fingerprint)
    session.total_steps = optim.num_epochs * order.steps
    average = average_from_flags(config.sync.sync, config.average)
    if average is not None:
        require_merge(average.every, session.total_steps)
    resumed = start.state is not None
    weights = "" if resumed else config.model.load_model_path
    recipe = _Recipe(
        config=replace(config, model=replace(config.model, load_model_path=weights)),
        run=run,
        device=session.device,
        steps=order.steps,
        folder=session.folder,
    )
    share = BatchShare()
    model = recipe.model(share, run.note)
    state = chain(model.named_parameters(), model.named_buffers())
    session.agree("model", model_facts(state))  # before anything of it is exchanged
    if any(isinstance(m, SyncBatchNorm) for m in model.modules()):
        run.open("data", "layers")
    criterion = nn.CrossEntropyLoss(label_smoothing=optim.label_smoothing)
    staged: StagedPass | None = None
    if config.pipeline.active:
        staged = cut(model, config, session, criterion, recipe.precision())
        model = staged.stage
    extensions = recipe.extensions(model)
    train, test = _open_data(config, session, sources, extensions)
    optimizer = recipe.optimizer(model)
    schedule = recipe.schedule(optimizer)
    precision = recipe.precision()
    start.given.add_optimizer("optimizer", optimizer, model)
    start.given.add_object("schedule", schedule)
    tracked: dict[str, Any] = {"schedule": schedule, "precision": precision}
    evaluated = model
    training_criterion: nn.Module = criterion
    for extension in extensions:
        tracked |= extension.entries()
        evaluated = extension.evaluated(evaluated)
        training_criterion = extension.criterion(training_criterion)
    start.restore({"model": model, "optimizer": optimizer, **tracked})
    for edit in edits_of(config, start):
        run.note(edit)
    pair = Pair(
        model=model,
        optimizer=optimizer,
        scope=WHOLE,
        entries=("model", "optimizer"),
        config=config.sync,
        share=share,
        average=average,
        buffers="local" if config.sync.stale else "broadcast",
    )
    replicas = session.replicate([pair])
    replicas[0].use_loss_scale(precision)
    if staged is not None:
        staged.replica = replicas[0]
    if average is not None:
        _note_long_rounds(average, order.steps, session)
    training = Training(
        pairs=[pair],
        replicas=replicas,
        tracked=tracked,
        # A resumed run had no weights of a checkpoint; a stage's rank can't make its own alone.
        beginning=None if resumed or staged is not None else recipe,
    )
    steps = session.bind(
        training,
        train.speeds,
        constant={"order": asdict(order), "data": sources.train.fingerprint},
        extensions=extensions,
    )
    steps.sum_values(BATCH_SUMS + 1)
    return Trainer(
        model=model,
        evaluated=evaluated,
        criterion=criterion,
        training_criterion=training_criterion,
        optimizer=optimizer,
        schedule=schedule,
        precision=precision,
        replica=replicas[0],
        steps=steps,
        train=train,
        test=test,
        folder=session.folder,
        weights_name=config.model.weights_name,
        about=describe(config, sources.train.label_names),
        epochs=optim.num_epochs,
        num_labels=config.data.num_labels,
        convergence=Convergence(target_accuracy=optim.target_accuracy, patience=optim.patience),
        extensions=extensions,
        fixed=fixed_norms(model, config.model.freeze),
        staged=staged,
    )


def _open_data(
    config: TrainConfig, session: Session, sources: Databases, extensions: Sequence[Extension]
) -> tuple[Batches, Batches | None]:
    """Make what decodes the records, and divides them among the ranks; collective."""
    run = session.run
    position = session.position
    decoding = Decoding(config, run, session.device, position.decode_device)
    session.resources.callback(decoding.close)
    speeds = session.worker_speeds(config.sync)
    speeds.batch_size = config.global_batch
    remedies = ("choose another --batch_size or --epoch_size", "add --sync_bn")
    trial = DecodeTrial(run, position, decoding.present) if decoding.tries else None
    common: dict[str, Any] = {
        "run": run,
        "speeds": speeds,
        "epochs": config.optim.num_epochs,
        "decoding": decoding.pool,
        "decode_device": decoding.present,
        "trial": trial,
        "small": SmallSlices(run, position, remedies),
    }
    loader = decoding.loader(sources.train, train=True, extensions=extensions)
    train = Batches(loader=loader, trains=True, **common)
    test = None
    if sources.test is not None:
        loader = decoding.loader(sources.test, train=False)
        test = Batches(loader=loader, trains=False, **common)
    return train, test


def _note_long_rounds(average: Average, steps: int, session: Session) -> None:
    """Note that epochs, which have so many steps, are shorter than the rounds of averaging."""
    assert session.total_steps is not None
    longest = max(h for first, h in average.phases if first < session.total_steps)
    if longest > steps:
        session.run.note(
            f"--average_every {longest} is more than the {steps} steps of an epoch: "
            "an epoch without a merge is evaluated and saved with the weights of the last "
            f"merge before it. Give at most {steps} for a merge in each epoch."
        )


def edits_of(config: TrainConfig, start: Start) -> list[str]:
    """Return notes on flags of the optimisation that replace those of the checkpoint."""
    if start.state is None:
        return []
    flags = asdict(config.optim)
    flags["param_dtype"] = config.sync.param_dtype
    del flags["batch_size"]  # of a machine; the global batch size can't be edited
    edited = edited_flags(start.state.get("config", {}), flags)
    texts = [f"{', '.join(edited)}."] if edited else []
    texts += _exchange_note(config.sync, start.state.get("config", {}))
    if start.given.resets(start.state):
        texts.append("The optimizer's state begins anew, because of --reset_optimizer.")
    return texts


def _exchange_note(config: SyncConfig, saved: Mapping[str, Any]) -> list[str]:
    """Return what becomes of momenta where servers exchange, before or after a start from a file.

    Where workers average, another note says so.
    """
    now = config.sync, config.staleness
    before = saved.get("sync", config.sync), saved.get("staleness", "0")
    methods = {now[0], before[0]}
    if before == now or "server" not in methods or "average" in methods:
        return []
    return [
        f"The checkpoint is of a run with {_exchange(*before)}, and this one has {_exchange(*now)}:"
        " it continues with the checkpoint's parameters and momenta, those of the whole model."
    ]


def _exchange(sync: str, staleness: str) -> str:
    return f"--sync {sync}" + (f" --staleness {staleness}" if sync == "server" else "")
