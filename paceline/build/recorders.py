"""Makes a rank's recorders."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from paceline.build.resume import Start
from paceline.cluster.members import Members
from paceline.config.train import TrainConfig
from paceline.observe.account import Account
from paceline.observe.console import Console
from paceline.observe.csv_log import CsvLog, log_name
from paceline.observe.events import EventFile
from paceline.observe.fanout import Fanout
from paceline.recorder import Recorder
from paceline.schedule import base_rate


def build_recorder(
    config: TrainConfig, members: Members, folder: Path, start: Start
) -> tuple[Recorder, Path | None]:
    """Make a rank's recorders, and tell where the CSV log is: rank 0 writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    events = EventFile(folder, members.rank)
    if members.rank > 0:
        return Account(events), None
    optim = config.optim
    rate = base_rate(optim.base_learning_rate, config.global_batch, scale=optim.scale_lr)
    log = CsvLog(
        folder,
        name=log_name(
            config.model.short_name,
            members.local_world_size,
            optim.batch_size,
            config.data.num_labels,
            rate,
        ),
        parameters=config.flat(),
        now=datetime.now(),
        epoch=start.position.epoch,
    )
    return Account(Fanout(events, log, Console())), log.path
