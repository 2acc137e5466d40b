"""Recorders of `paceline train`: the CSV log, consoles, and the leader's trackers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from paceline.cluster.print_message import print_message
from paceline.config.run import OutputConfig
from paceline.config.train import TrainConfig
from paceline.errors import ConfigError
from paceline.generation.run import Run
from paceline.observe.console import Console, MachineConsole
from paceline.observe.cost.cost_meter import CostMeter
from paceline.observe.csv_log import CsvLog, log_name
from paceline.observe.leader_recorder import LeaderRecorder
from paceline.observe.trackers.tracker import Tracker
from paceline.observe.trackers.trackers import open_trackers, require_installed
from paceline.recorder import Recorder
from paceline.run.learning_rate import base_rate
from paceline.session.session import Session


def record_training(config: TrainConfig, session: Session, *, supervised: bool = False) -> None:
    """Record a run of the command from now on, and show it.

    Args:
        config: the run's configuration.
        session: of this member, which knows where the run starts.
        supervised: a supervisor has started all processes of the run on this machine.
    """
    assert session.folder is not None
    folder = session.folder
    optim = config.optim
    run = session.run
    rate = base_rate(optim.base_learning_rate, config.global_batch, scale=optim.scale_lr)
    name = log_name(
        config.model.short_name,
        run.context.world.local_world_size,
        optim.batch_size,
        config.data.num_labels,
        rate,
    )
    log = CsvLog(
        folder,
        name=name,
        parameters=config.flat(),
        now=datetime.now(),
        epoch=session.position.epoch,
        totals=session.start.totals,
        leadership=run,
        membership=run.membership,
    )
    began = time.monotonic()

    def open_recorders() -> list[Recorder]:
        console = Console(log=log, started=began)
        return [console, *open_trackers_of(config.output, folder, config.flat())]

    def open_console() -> list[Recorder]:
        group = run.context.world
        return [MachineConsole(group.machine, group.generation.members[0].machine)]

    session.meter = CostMeter(session.device, supervised=supervised)
    others = (log, session.meter, LeaderRecorder(_FirstOfMachine(run), open_console))
    session.record(open_recorders, *others)


def open_trackers_of(
    output: OutputConfig, folder: Path, parameters: Mapping[str, object]
) -> list[Tracker]:
    """Open the leader's recorders that pass values to experiment trackers.

    A run continues without a tracker whose package the machine of a later leader lacks.
    """
    names = []
    for name in output.trackers:
        try:
            require_installed([name])
            names.append(name)
        except ConfigError as error:
            print_message(f"The run continues without its tracker {name}: {error}")
    return open_trackers(names, folder, parameters)


class _FirstOfMachine:
    """Leadership of a machine without rank 0: its first process shows the run's progress there."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def leads(self) -> bool:
        """Whether this process shows it, in the present generation."""
        group = self._run.context.world
        return group.local_rank == 0 and group.machine != group.generation.members[0].machine
