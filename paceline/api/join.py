"""`join`: connects this process to its world, under any launcher, and finds where its run resumes.

launcher ── group, device ── run folder ── agreement ── connections ── newest checkpoint
"""

from __future__ import annotations

import signal
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from paceline.api.argument_names import errors_name_arguments, print_message_for_scripts
from paceline.api.default_group import open_default_group, require_none
from paceline.api.exit_handler import ExitHandler
from paceline.api.open_world import end_earlier_world
from paceline.api.session import Session
from paceline.api.world import World
from paceline.cluster.environment import Environment, is_interactive, read_environment
from paceline.cluster.join import Joined, join_world
from paceline.cluster.membership.generation import Group
from paceline.cluster.rendezvous.preflight import version_facts
from paceline.cluster.supervision.interactive_signals import InteractiveSignals
from paceline.cluster.supervision.requests.member_record import remove_records_of_machine
from paceline.cluster.supervision.requests.run_presence import RunPresence
from paceline.cluster.supervision.requests.run_status import RunStatus
from paceline.cluster.supervision.stop_signals import StopSignals
from paceline.cluster.supervision.supervisor import print_message
from paceline.config.rules import positive, silence
from paceline.config.run import OutputConfig
from paceline.errors import ConfigError
from paceline.observe.event_file import EventFile
from paceline.observe.loss_history import LossHistory
from paceline.observe.speed_recorder import SpeedRecorder
from paceline.observe.trackers.trackers import require_installed
from paceline.recorder import MemberRecorder
from paceline.session import (
    Start,
    build_leader_recorder,
    build_trace,
    build_trackers,
    find_start,
    report_recovery,
)
from paceline.state.run_folder import RunFolder
from paceline.timeline.step_account import StepAccount
from paceline.wiring import cores_per_worker

# Seconds, as the flags' defaults.
_FIRST_TIMEOUT = 1200.0
_TIMEOUT = 60.0
_IDLE_TIMEOUT = 1800.0


def join(
    run: str | Path | None = None,
    *,
    resume: str | Path = "auto",
    reset_optimizer: bool = False,
    checkpoint_steps: int = 0,
    checkpoint_minutes: float = 5.0,
    keep_checkpoints: int = 2,
    snapshots: bool = True,
    snapshot_memory_mb: float = 0.0,
    replica_check: bool = True,
    trace_steps: str = "",
    tracker: str = "",
    seed: int = 0,
    device: str | torch.device | None = None,
    first_iter_timeout: float | None = None,
    timeout: float | None = None,
    peer_timeout: float = 10.0,
    idle_timeout: float | None = None,
    default_group: bool = False,
) -> World:
    """Connect this process to those that were started with it; collective.

    Works under `paceline launch`, torchrun, mpirun and Slurm's srun. A process that no launcher
    started is a world of one rank.

    In a notebook or another interactive interpreter, a world that is still open is closed first,
    and its state is saved. So a cell that joins may run twice.

    Args:
        run: the folder for the run's events and checkpoints; with None nothing is written.
        resume: "auto" resumes from the run's newest checkpoint, if there is one; "no" begins a new
            run; anything else is the path of another run's checkpoint to start from.
        reset_optimizer: begin the optimizers' state anew where a checkpoint is resumed from, as is
            needed for an optimizer of another class; weights, epoch and schedules continue. A run
            does so once, even if each of its starts has this argument.
        checkpoint_steps: save every so many steps; 0: only by time and at each epoch's end.
        checkpoint_minutes: save every so many minutes, besides at each epoch's end; 0: never.
        keep_checkpoints: the number of checkpoints to retain, the newest ones.
        snapshots: copy the training state to the memory of this machine while steps run, as often
            as this takes less than 1% of the training time, and retain the two newest copies. With
            SGD and momentum both together take about 4 times the size of the model (parameters and
            buffers) per process, with Adam 6 times, with SGD without momentum 2 times; on rank 0
            half as much again while a checkpoint is written. Without them, a script that is stopped
            in the middle of a long step has the last checkpoint only. Rank 0's argument is used.
        snapshot_memory_mb: the limit of their memory, in MiB per process; if the two newest would
            take more, none are taken. 0: no limit.
        replica_check: compare checksums of the processes' parameters, buffers and optimizer states,
            as often as this takes less than 0.1% of the time, and before a checkpoint is saved; a
            script whose processes differ stops with an error. Rank 0's argument is used.
        trace_steps: trace these steps of the run into its folder, "FIRST:LAST", counted from 0.
        tracker: experiment trackers that show the run, separated by commas: tensorboard, wandb
            (Weights & Biases), mlflow. Rank 0's argument is used.
        seed: of the data order and of each step's random streams.
        device: where to compute; by default the GPU of this process's local rank, or the CPU if
            there is no GPU.
        first_iter_timeout: seconds to wait for all processes, and for the first step; by default
            the launcher's, or 1,200.
        timeout: seconds to wait for another process in any later step; by default the launcher's,
            or 60.
        peer_timeout: seconds without a sign of life after which another process counts as lost;
            the others then continue without it.
        idle_timeout: seconds for which a process may work outside a step, such as in an evaluation
            of its own, while others wait for it; then the run ends. By default the launcher's, or
            1,800.
        default_group: make torch's default process group of all ranks, for libraries that look for
            it (torchmetrics, code that asks `torch.distributed.is_initialized()`): by Gloo for
            CPUs, and by NCCL where each rank has its GPU. The loss of a process then ends the run.

    Raises:
        ConfigError: an argument breaks a rule, the ranks differ, or the run is active elsewhere.
        CheckpointError: the run has checkpoints, and none can be read.
        CommError: a process is late or can't be reached.
    """
    with errors_name_arguments():
        try:
            environment = read_environment()
        except ConfigError:
            ExitHandler(Environment(interactive=is_interactive()))  # prints the sentence alone
            raise
        end_earlier_world("paceline.join()", interactive=environment.interactive)
        exit_handler = ExitHandler(environment)
        worker = environment.worker
        defaults = (_FIRST_TIMEOUT, _TIMEOUT, _IDLE_TIMEOUT)
        if worker is not None:
            defaults = (worker.first_iter_timeout, worker.timeout, worker.idle_timeout)
        timeouts = (
            defaults[0] if first_iter_timeout is None else first_iter_timeout,
            defaults[1] if timeout is None else timeout,
        )
        positive("first_iter_timeout", timeouts[0])
        positive("timeout", timeouts[1])
        idle = defaults[2] if idle_timeout is None else idle_timeout
        positive("idle_timeout", idle)
        silence("peer_timeout", peer_timeout)
        if default_group:
            require_none()
        output = OutputConfig(
            resume=str(resume),
            reset_optimizer=reset_optimizer,
            checkpoint_steps=checkpoint_steps,
            checkpoint_minutes=checkpoint_minutes,
            keep_checkpoints=keep_checkpoints,
            snapshots=snapshots,
            snapshot_memory_mb=snapshot_memory_mb,
            replica_check=replica_check,
            trace_steps=trace_steps,
            tracker=tracker,
        )
        for name, needs_folder in (
            (f"trace_steps {trace_steps}", trace_steps),
            (f"tracker {tracker}", tracker),
            (f"resume {resume}", output.resume not in ("auto", "no")),
        ):
            if run is None and needs_folder:
                raise ConfigError(f"{name} needs a run folder: pass run=… to paceline.join().")
        folder = None if run is None else Path(run)
        resources = ExitStack()
        try:
            joined = join_world(environment, first_iter_timeout=timeouts[0], timeout=timeouts[1])
            chosen = _device(device, joined.group)
            exit_handler.activate(joined)
            session = Session(
                joined=joined,
                device=chosen,
                timeouts=timeouts,
                peer_timeout=peer_timeout,
                idle_timeout=idle,
                default_group=default_group,
                run=folder,
                output=output,
                seed=seed,
                signals=StopSignals(partial(_print_stopped, joined, folder)),
                interactive_signals=InteractiveSignals(enabled=environment.interactive),
                exit_handler=exit_handler,
                resources=resources,
            )
            return _open_world(session)
        except BaseException:
            resources.__exit__(*sys.exc_info())
            raise


def _open_world(session: Session) -> World:
    """Agree with the other ranks, connect to them and find where the run resumes; collective."""
    path = session.run
    output = session.output
    group = session.joined.group
    if group.rank == 0:
        require_installed(output.trackers)
    session.require_equal("versions", version_facts())  # all have closed their earlier worlds
    folder = None if path is None else RunFolder(path, shard_id=group.machine)
    session = replace(session, folder=folder)
    if folder is not None and group.local_rank == 0:
        folder.check(session.identity, anew=output.resume == "no")
        folder.open(session.identity)
        session.resources.push(folder)
        remove_records_of_machine(folder.path, group.machine)
    given = {"run": "given" if path else "not given", "trace_steps": output.trace_steps}
    given |= {"default_group": "True"} if session.default_group else {}
    session.require_equal("arguments of join()", {**session.identity, **given})
    if folder is not None and group.local_rank > 0:  # the first process here has opened it
        folder.hold(group.local_rank)
        session.resources.push(folder)
    if group.local_world_size > 1:  # the cores of a machine are shared among its processes
        cores = cores_per_worker(group.local_world_size)
        torch.set_num_threads(min(torch.get_num_threads(), cores))
    run = session.connect()
    group = run.context.world
    joined = replace(session.joined, group=group)
    session = replace(session, joined=joined, membership=run.membership)
    start = Start()
    speed = SpeedRecorder()
    if session.default_group:
        open_default_group(session, run)
    losses = LossHistory(partial(report_recovery, run))
    if path is not None:
        start = find_start(output, path, session.identity, run)
        for note in start.notes if group.rank == 0 else ():
            print_message(note)
        path.mkdir(parents=True, exist_ok=True)  # on machines without rank 0
        run.trace = build_trace(output, run, path, print_message_for_scripts)
        parameters = {**session.identity, "world_size": group.size, "device": session.device.type}
        account = StepAccount(
            EventFile(path, group.member.id, run.membership),
            build_leader_recorder(run, partial(build_trackers, output, path, parameters)),
            speed,
            losses,
            trace=run.trace,
        )
        run.recorder = MemberRecorder(account, run.membership)
    session.resources.callback(run.recorder.close)
    world = World(session, run, start)
    if path is not None:

        def report() -> RunStatus:
            return RunStatus.of(
                run.context.world.generation,
                world.steps,
                samples_per_second=speed.samples_per_second(),
                losses=losses.losses,
            )

        presence = RunPresence.of_member(path, group.member, report=report)
        session.resources.callback(presence.close)
    return world


def _print_stopped(joined: Joined, run: Path | None, number: signal.Signals) -> None:
    """Print once that the run stops, where no supervisor of Paceline prints it."""
    if run is not None and joined.group.rank == 0 and joined.launcher != "paceline":
        print_message(f"stopped by {number.name}: the state is being saved.")


def _device(given: str | torch.device | None, group: Group) -> torch.device:
    """Choose the device of a process.

    Raises:
        ConfigError: the device isn't there, or there are fewer GPUs than processes.
    """
    gpus = torch.cuda.device_count()
    if given is not None:
        try:
            device = torch.device(given)
        except RuntimeError as error:
            raise ConfigError(
                f"device is {given!r}; supported devices are cpu and cuda."
            ) from error
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(f"device is {device}; supported devices are cpu and cuda.")
        if device.type == "cuda" and (device.index or 0) >= gpus:
            raise ConfigError(f"device is {device}, but torch finds {gpus} GPUs on this machine.")
    elif gpus == 0:
        device = torch.device("cpu")
    elif gpus == 1 or group.local_rank < gpus:  # a scheduler may show each process its own GPU
        device = torch.device("cuda", min(group.local_rank, gpus - 1))
    else:
        raise ConfigError(
            f"{group.local_world_size} processes share the {gpus} GPUs of this machine: start "
            "one process per GPU, or pass device='cpu'."
        )
    if device.type == "cuda":
        device = torch.device("cuda", group.local_rank if device.index is None else device.index)
        torch.cuda.set_device(device)
    return device
