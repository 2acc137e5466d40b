"""A worker of `paceline train`: everything from its rank in the world to the end of the run."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch._C._distributed_c10d import Store

from paceline import wiring
from paceline.cli.garbage_collection import uncollected
from paceline.cluster.membership.evidence import EvidenceOptions
from paceline.cluster.membership.generation import Group
from paceline.cluster.stores.failure_report import FailureReport
from paceline.cluster.supervision.requests.run_presence import RunPresence
from paceline.cluster.supervision.requests.run_status import RunStatus
from paceline.cluster.supervision.stop_signals import StopSignals
from paceline.cluster.supervision.supervisor import print_message, save_after, saved_sentence
from paceline.config.train import TrainConfig
from paceline.errors import ServerLost
from paceline.observe.loss_history import LossHistory
from paceline.observe.speed_recorder import SpeedRecorder
from paceline.run.steps import Stop
from paceline.session import (
    Start,
    build_recorder,
    build_trace,
    build_trainer,
    find_start,
    report_recovery,
)
from paceline.session.agreement import agree_on_inputs, agree_on_model
from paceline.session.connect import begin_votes, connect_run
from paceline.state.weights import weights_files
from paceline.trainer import Trainer

_TERMINATED = 143  # the status where another worker received the signal


def train(config: TrainConfig, group: Group, store: Store, *, survives: bool = False) -> Group:
    """Train as one worker of the world, to the end or until a signal.

    Where it doesn't end well, rank 0 saves the newest state in memory.

    Args:
        config: the flags.
        group: all ranks, as this one sees them.
        store: the store of the start.
        survives: the loss of another worker doesn't end this one.

    Returns:
        the ranks of the generation that reached the end.

    Raises:
        PacelineError: the run failed.
        SystemExit: a worker of the run received a signal to stop; the run's state is saved.
    """
    with uncollected():
        wiring.import_optimizers()
    folder = Path(config.output.output_dir, config.world.run_id)
    device = wiring.device_of(config, group.local_rank)
    torch.set_num_threads(wiring.cores_per_worker(group.local_world_size))
    signals = StopSignals()
    with ExitStack() as stack:
        sources = wiring.open_sources(config)
        stack.callback(sources.close)
        agree_on_inputs(config, group, store, sources)
        run = connect_run(
            group,
            store,
            stack,
            device=device,
            limits=(config.world.first_iter_timeout, config.world.timeout),
            survives=survives and config.output.snapshots,
            signals=signals,
            options=_options(config),
            report=print_message,
        )
        membership = run.membership
        wiring.refuse_shared_gpu(run.context.sharing, config.sync.sync)
        start = find_start(config.output, folder, config.identity(), run)
        run.trace = build_trace(config.output, run, folder)
        speed = SpeedRecorder()
        losses = LossHistory(partial(report_recovery, run))
        run.recorder = build_recorder(config, run, folder, start, speed, losses)
        stack.callback(run.recorder.close)
        if run.leads:
            wiring.write_class_names(folder, sources)
        trainer = build_trainer(
            config,
            run,
            sources,
            device,
            folder,
            start,
            stopping=lambda: signals.status != 0,
            agree=partial(agree_on_model, config, group, store),
        )
        stack.callback(trainer.replica.close)
        stack.callback(trainer.resources.close)
        _announce(config, trainer, start)

        def report() -> RunStatus:
            return RunStatus.of(
                run.context.world.generation,
                trainer.steps.position.number,
                total_steps=trainer.epochs * trainer.train.steps,
                samples_per_second=speed.samples_per_second(),
                losses=losses.losses,
            )

        presence = RunPresence.of_member(folder, group.member, report=report)
        stack.callback(presence.close)
        begin_votes(run)
        try:
            ended = _run(trainer, signals, folder)
        except ServerLost:  # on all workers: that this one ends is no loss
            membership.leave()
            raise
        except Exception as error:
            membership.leave(FailureReport.of(error))
            raise
        run.context.activities.close()
        membership.leave()
        if not ended:
            sys.exit(signals.status or _TERMINATED)
        position = trainer.steps.position
        files = weights_files(folder, config.model.weights_name)
        run.recorder.event(
            "end",
            generation=trainer.steps.generation,
            best=position.best,
            best_epoch=position.best_epoch,
            weights=[str(path) for path in files if path.is_file()],
        )
        return run.context.world


def _options(config: TrainConfig) -> EvidenceOptions:
    world = config.world
    return EvidenceOptions(
        peer_timeout=world.peer_timeout, timeout=world.timeout, idle_timeout=world.idle_timeout
    )


def _run(trainer: Trainer, signals: StopSignals, folder: Path) -> bool:
    """Train, and leave when the peers need nothing more; return False if a signal stopped it."""
    first = trainer.steps.position.number

    def rescue(error: BaseException | None = None) -> str:
        if error is not None and trainer.steps.position.number == first:
            return ""  # nothing new to save, or to resume
        first_here = trainer.steps.run.context.world.local_rank == 0
        return save_after(error, folder, trainer.steps.rescue, first_here=first_here)

    with signals.received(rescue):
        try:
            trainer.run()
            ended = True
        except Stop:
            ended = False
            if trainer.steps.run.leads:
                print_message(saved_sentence(folder, trainer.steps.position.number))
        except BaseException as error:
            if saved := rescue(error):
                print_message(saved)
            raise
        trainer.replica.drain()
        return ended


def _announce(config: TrainConfig, trainer: Trainer, start: Start) -> None:
    trainer.steps.recovery.record_start(
        start.origin,
        model=config.model.name,
        device=trainer.device.type,
        samples=trainer.train.samples,
        steps=trainer.train.steps,
        epochs=trainer.epochs,
        labels=trainer.num_labels,
        batch=config.global_batch,
    )
    for note in start.notes:
        trainer.steps.run.recorder.event("note", text=note)
