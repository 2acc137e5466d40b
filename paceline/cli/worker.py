"""A worker of `paceline train`: everything from its rank in the world to the end of the run."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import torch
from torch._C._distributed_c10d import Store
from torch.optim import SGD

from paceline.atomic_write import explained_writes, write_atomically
from paceline.cli.garbage_collection import uncollected
from paceline.cluster.membership.evidence import EvidenceOptions
from paceline.cluster.membership.generation import Group
from paceline.cluster.print_message import print_message
from paceline.cluster.supervision.stop_signals import StopSignals
from paceline.config.train import TrainConfig
from paceline.generation.notes import Notes
from paceline.observe.model_card import CARD_NAME, model_card
from paceline.observe.run_summary import RunSummary
from paceline.run.steps import Stop
from paceline.session.agreement import agree_on_inputs
from paceline.session.command_trainer import build_trainer
from paceline.session.recorders import record_training
from paceline.session.resume.machine_folders import first_of_machine
from paceline.session.session import Session
from paceline.session.sources import cores_per_worker, open_sources, write_class_names
from paceline.session.stage_checks import in_stages
from paceline.state.run_folder import record_edits
from paceline.state.weights import weights_files
from paceline.trainer import Trainer
from paceline.wiring.connections import refuse_shared_gpu


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
        SGD([torch.zeros((), requires_grad=True)], lr=0)  # which imports as much again as torch
    torch.set_num_threads(cores_per_worker(group.local_world_size))
    group = in_stages(group, config.pipeline.stages)
    with ExitStack() as resources:
        sources = open_sources(config)
        resources.callback(sources.close)
        agree_on_inputs(config, group, store, sources)
        device = _device_of(config, group.local_rank)
        session = open_session(config, device, resources, survives=survives)
        session.connect(group, store)
        run = session.run
        refuse_shared_gpu(run.context.sharing, config.sync.sync)
        session.resume()
        record_training(config, session, supervised=survives)
        if run.leads and session.folder is not None:
            write_class_names(session.folder, sources)
        trainer = build_trainer(config, session, sources)
        _record_start(config, session, trainer)
        session.answer_requests()
        session.begin()
        try:
            ended = _run(trainer, session)
        except Exception as error:
            session.leave(error)
            raise
        session.leave()
        if not ended:
            sys.exit(session.exit_status)
        _record_end(session, trainer)
        if run.leads:
            _write_card(config, trainer)
        return run.context.world


def open_session(
    config: TrainConfig, device: torch.device, resources: ExitStack, *, survives: bool = False
) -> Session:
    """Make the session of a worker, which isn't connected yet.

    Args:
        config: the flags.
        device: this worker's.
        resources: closes what the session opens.
        survives: the loss of another worker doesn't end this one.
    """
    world = config.world
    return Session(
        device=device,
        timeouts=(world.first_iter_timeout, world.timeout),
        silence=EvidenceOptions(
            peer_timeout=world.peer_timeout, timeout=world.timeout, idle_timeout=world.idle_timeout
        ),
        survives=survives and config.output.snapshots,
        folder=Path(config.output.output_dir, world.run_id),
        output=config.output,
        identity=config.identity(),
        seed=config.optim.seed,
        signals=StopSignals(),
        notes=Notes(),
        resources=resources,
    )


def _device_of(config: TrainConfig, local_rank: int) -> torch.device:
    """Return the device of a machine's worker."""
    if config.world.use_cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    if config.world.gpu_numbers:
        return torch.device("cuda", config.world.gpu_numbers[local_rank])
    if torch.cuda.device_count() == 1:  # a scheduler may show each worker its own only
        return torch.device("cuda", 0)
    return torch.device("cuda", local_rank)


def _run(trainer: Trainer, session: Session) -> bool:
    """Train, and leave when the peers need nothing more; return False if a signal stopped it."""
    first = session.position.number

    def rescue(error: BaseException | None = None) -> str:
        # Before the first step ends there is nothing new to save, or to resume.
        unchanged = error is not None and session.position.number == first
        return "" if unchanged else session.rescue(error)

    with session.signals.received(rescue):
        try:
            trainer.run()
            ended = True
        except Stop:
            ended = False
            session.print_stopped()
        except BaseException as error:
            if saved := rescue(error):
                print_message(saved)
            raise
        trainer.replica.drain()
        return ended


def _record_start(config: TrainConfig, session: Session, trainer: Trainer) -> None:
    if first_of_machine(session.run.context.world):
        record_edits(trainer.folder, config.identity())
    session.record_start(
        model=config.model.name,
        device=session.device.type,
        samples=trainer.train.samples,
        steps=trainer.train.steps,
        epochs=trainer.epochs,
        labels=trainer.num_labels,
        batch=config.global_batch,
        **({} if config.pipeline.stages == 1 else {"stages": config.pipeline.stages}),
    )
    for note in session.start.notes:
        session.run.note(note)


def _record_end(session: Session, trainer: Trainer) -> None:
    position = session.position
    early = position.epoch < trainer.epochs
    files = weights_files(trainer.folder, trainer.weights_name)
    session.run.recorder.event(
        "end",
        generation=trainer.steps.generation,
        best=position.best,
        best_epoch=position.best_epoch,
        reason=trainer.convergence.reason(position) if early else "",
        weights=[str(path) for path in files if path.is_file()],
    )


def _write_card(config: TrainConfig, trainer: Trainer) -> None:
    """Write the model card of a run that has ended, where it has weights.

    Raises:
        PacelineError: the folder can't be read or written.
    """
    folder = trainer.folder
    files = [path for path in weights_files(folder, trainer.weights_name) if path.is_file()]
    if not files:
        return
    counts = (parameter.numel() for parameter in trainer.model.parameters())
    card = model_card(
        RunSummary.of_folder(folder, config.identity(), finished=True, active=True),
        trainer.about,
        files,
        parameters=sum(counts) if trainer.staged is None else None,
        data={"training": config.data.train_data, "test": config.data.test_data},
    )
    path = folder / CARD_NAME
    with explained_writes(path):
        write_atomically(path, card)
