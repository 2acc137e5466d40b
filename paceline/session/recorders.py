"""Recorders of a member: event file and trace; as the leader log, console and trackers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from paceline.cluster.supervision.supervisor import print_message
from paceline.config.run import OutputConfig
from paceline.config.train import TrainConfig
from paceline.errors import ConfigError, Message
from paceline.generation.run import Run
from paceline.observe.console import Console, MachineConsole
from paceline.observe.csv_log import CsvLog, log_name
from paceline.observe.event_file import EventFile
from paceline.observe.leader_recorder import LeaderRecorder
from paceline.observe.trackers.tracker import Tracker
from paceline.observe.trackers.trackers import open_trackers, require_installed
from paceline.recorder import MemberRecorder, Recorder
from paceline.run.learning_rate import base_rate
from paceline.session.resume.start import Start
from paceline.timeline.step_account import StepAccount
from paceline.timeline.step_trace import Trace


def build_trace(
    output: OutputConfig,
    run: Run,
    folder: Path,
    report: Callable[[str | Message], None] = print_message,
) -> Trace | None:
    """Make what traces the steps that are to be traced; its file goes into `folder`."""
    steps = output.traced
    if steps is None:
        return None
    path = folder / f"trace.steps{steps[0]}-{steps[-1]}.json"
    machine = run.context.world.machine
    return Trace(path, steps, run, machine, report=report)


def build_trackers(
    output: OutputConfig, folder: Path, parameters: Mapping[str, object]
) -> list[Tracker]:
    """Make the leader's recorders that pass values to experiment trackers.

    A run continues without a tracker whose package the machine of a later leader lacks.
    """
    names = []
    for name in output.trackers:
        try:
            require_installed([name])
            names.append(name)
        except ConfigError as error:
            print_message(f"The run continues without its tracker {name}: {error}")
    return open_trackers(names, folder, parameters, print_message)


def build_leader_recorder(
    run: Run, open_recorders: Callable[[], Sequence[Recorder]]
) -> LeaderRecorder:
    """Make what opens recorders while this process is the leader, in each generation."""
    return LeaderRecorder(run, open_recorders)


class _ShownHere:
    """Whether this process is the one that shows a run's progress on a machine without rank 0."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def leads(self) -> bool:
        """Whether it is, in the present generation."""
        group = self._run.context.world
        return group.local_rank == 0 and group.machine != group.generation.members[0].machine


def build_machine_recorder(run: Run) -> LeaderRecorder:
    """Make what shows a run's progress on a machine without the leader, in each generation."""

    def open_console() -> list[Recorder]:
        group = run.context.world
        return [MachineConsole(group.machine, group.generation.members[0].machine)]

    return LeaderRecorder(_ShownHere(run), open_console)


def report_recovery(run: Run, generation: int, seconds: float) -> None:
    """Print, as the leader, what the losses before a generation cost."""
    if run.leads:
        print_message(
            f"Generation {generation} made its first new step {seconds:.2f} s after the loss was "
            "detected."
        )


def build_recorder(
    config: TrainConfig, run: Run, folder: Path, start: Start, *others: Recorder
) -> Recorder:
    """Make a member's recorders, and hand over the leader's in each generation.

    Args:
        config: the run's configuration.
        run: the run, whose trace receives all spans and events, too.
        folder: the run's; made.
        start: where the run starts.
        others: receive all events, too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    optim = config.optim
    group = run.context.world
    rate = base_rate(optim.base_learning_rate, config.global_batch, scale=optim.scale_lr)
    log = CsvLog(
        folder,
        name=log_name(
            config.model.short_name,
            group.local_world_size,
            optim.batch_size,
            config.data.num_labels,
            rate,
        ),
        parameters=config.flat(),
        now=datetime.now(),
        epoch=start.position.epoch,
        totals=start.totals,
        leadership=run,
        membership=run.membership,
    )
    began = time.monotonic()

    def open_recorders() -> list[Recorder]:
        console = Console(log=log.path, shown=lambda: log.recorded, started=began)
        return [console, *build_trackers(config.output, folder, config.flat())]

    events = EventFile(folder, group.member.id, run.membership)
    leader = build_leader_recorder(run, open_recorders)
    machine = build_machine_recorder(run)
    account = StepAccount(events, log, leader, machine, *others, trace=run.trace)
    return MemberRecorder(account, run.membership)
