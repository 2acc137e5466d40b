"""Recorders of a rank: event file, log, console, trace and trackers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

import torch

from paceline.cluster.membership.generation import Group
from paceline.cluster.supervision.supervisor import print_message
from paceline.config.run import OutputConfig
from paceline.config.train import TrainConfig
from paceline.errors import Message
from paceline.observe.console import Console
from paceline.observe.csv_log import CsvLog, log_name
from paceline.observe.event_file import EventFile
from paceline.observe.step_account import StepAccount
from paceline.observe.trace.step_trace import Trace
from paceline.observe.trackers.tracker import Tracker
from paceline.observe.trackers.trackers import open_trackers
from paceline.recorder import Recorder
from paceline.run.learning_rate import base_rate
from paceline.run.run import Run
from paceline.wiring.resume import Start


def build_trace(
    output: OutputConfig,
    run: Run,
    folder: Path,
    device: torch.device,
    report: Callable[[str | Message], None] = print_message,
) -> Trace | None:
    """Make what traces the steps that are to be traced; its file goes into `folder`."""
    steps = output.traced
    if steps is None:
        return None
    path = folder / f"trace.steps{steps[0]}-{steps[-1]}.json"
    machine = run.context.group.machine
    return Trace(path, steps, lambda: run.context.communicator, device, machine, report=report)


def build_trackers(
    output: OutputConfig, group: Group, folder: Path, parameters: Mapping[str, object]
) -> list[Tracker]:
    """Make the recorders that pass values to experiment trackers; only rank 0 has any."""
    names = output.trackers if group.rank == 0 else ()
    return open_trackers(names, folder, parameters, print_message)


def build_recorder(
    config: TrainConfig,
    group: Group,
    folder: Path,
    start: Start,
    trace: Trace | None = None,
    *others: Recorder,
) -> tuple[Recorder, Path | None]:
    """Make a rank's recorders, and report where rank 0 writes the CSV log.

    Args:
        config: the run's configuration.
        group: all ranks.
        folder: the run's; made.
        start: where the run starts.
        trace: receives all spans and events, too.
        others: receive all events, too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    events = EventFile(folder, group.member.id)
    if group.rank > 0:
        return StepAccount(events, *others, trace=trace), None
    optim = config.optim
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
    )
    trackers = build_trackers(config.output, group, folder, config.flat())
    return StepAccount(events, log, Console(), *trackers, *others, trace=trace), log.path
