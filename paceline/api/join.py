"""`join`: connects this process to its world, under any launcher, and finds where its run resumes.

launcher ── group, device ── run folder ── agreement ── connections ── newest checkpoint
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from paceline.api.argument_names import ScriptNotes, errors_name_arguments
from paceline.api.default_group import open_default_group, require_none
from paceline.api.exit_handler import ExitHandler
from paceline.api.open_world import end_earlier_world
from paceline.api.script_process import ScriptProcess
from paceline.api.world import World
from paceline.cluster.environment import Environment, is_interactive, read_environment
from paceline.cluster.join import Joined, join_world
from paceline.cluster.membership.evidence import EvidenceOptions
from paceline.cluster.membership.generation import Group
from paceline.cluster.print_message import print_message
from paceline.cluster.rendezvous.preflight import compare, version_facts
from paceline.cluster.supervision.interactive_signals import InteractiveSignals
from paceline.cluster.supervision.requests.member_record import remove_records_of_machine
from paceline.cluster.supervision.stop_signals import StopSignals
from paceline.config.rules import positive, silence
from paceline.config.run import OutputConfig, SnapshotCopies
from paceline.errors import ConfigError
from paceline.generation.mesh import Mesh
from paceline.observe.trackers.tracker import Tracker
from paceline.observe.trackers.trackers import require_installed
from paceline.session.recorders import open_trackers_of
from paceline.session.session import Session
from paceline.session.sources import cores_per_worker
from paceline.state.run_folder import RunFolder

# Seconds, as the flags' defaults.
_FIRST_TIMEOUT = 1200.0
_TIMEOUT = 60.0
_IDLE_TIMEOUT = 1800.0
_AXES = ("stage", "tensor")  # that a mesh may be given


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
    snapshot_copies: SnapshotCopies = "auto",
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
    mesh: Mapping[str, int] | None = None,
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
        snapshot_copies: what each process copies, from three processes on: "whole", all of the
            state; "divided", where processes are equal, its own part and that of another one (on
            another machine, if there is one), so that of N processes each takes 2/N of the memory.
            After the loss of a process the others get the missing parts from each other; after the
            loss of both that have a part, the run continues from the last checkpoint, as it does if
            it is stopped in the middle of a long step. "auto": "divided" where whole copies of all
            processes would take more than a quarter of the machine's memory. Rank 0's argument is
            used.
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
        mesh: among how many processes each replica of the model is divided, the same on all ranks:
            {"stage": 2} for a pipeline of two stages, {"tensor": 2} for tensors that two processes
            of one machine share, or both; their product divides the world, and the rest of it is
            replicas. Stages lie as far apart as they can, on machines of their own where there are
            as many. None: each process has a replica.

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
        lengths = _lengths(mesh)
        output = OutputConfig(
            resume=str(resume),
            reset_optimizer=reset_optimizer,
            checkpoint_steps=checkpoint_steps,
            checkpoint_minutes=checkpoint_minutes,
            keep_checkpoints=keep_checkpoints,
            snapshots=snapshots,
            snapshot_memory_mb=snapshot_memory_mb,
            snapshot_copies=snapshot_copies,
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
            joined = _divided(joined, lengths)
            chosen = _device(device, joined.group)
            exit_handler.activate(joined)
            signals = StopSignals()
            signals.when_received(partial(_print_stopped, joined, folder))
            process = ScriptProcess(
                joined=joined,
                interactive_signals=InteractiveSignals(enabled=environment.interactive),
                exit_handler=exit_handler,
            )
            session = Session(
                device=chosen,
                timeouts=timeouts,
                silence=EvidenceOptions(
                    peer_timeout=peer_timeout, timeout=timeouts[1], idle_timeout=idle
                ),
                # Other launchers end all processes where one is lost.
                survives=joined.launcher == "paceline" and not default_group,
                folder=folder,
                output=output,
                identity={"seed": seed, **_mesh_entry(lengths)},
                seed=seed,
                signals=signals,
                notes=ScriptNotes(),
                resources=resources,
            )
            return _open_world(process, session, default_group=default_group)
        except BaseException:
            resources.__exit__(*sys.exc_info())
            raise


def _lengths(mesh: Mapping[str, int] | None) -> dict[str, int]:
    """Return the lengths of the axes that divide a replica, without those of 1.

    Raises:
        ConfigError: it is no mapping, there is no such axis, or a length isn't a whole number of at
            least 1.
    """
    given = mesh or {}
    if not isinstance(given, Mapping):
        rule = "must be a dictionary of axes and their lengths"
        raise ConfigError(flag="mesh", value=given, rule=rule, remedy='give {"stage": 2}')
    for axis, length in given.items():
        if axis not in _AXES:
            rule = "its axes are stage and tensor; the rest of the world is data"
            raise ConfigError(flag="mesh", value=given, rule=rule, remedy=f"leave out {axis!r}")
        if type(length) is not int or length < 1:
            rule = "the length of an axis must be a whole number of at least 1"
            raise ConfigError(flag="mesh", value=given, rule=rule, remedy=f"change {axis!r}")
    return {axis: given[axis] for axis in _AXES if given.get(axis, 1) > 1}


def _mesh_entry(lengths: Mapping[str, int]) -> dict[str, str]:
    """Return the entry of a run's configuration for a mesh: a run with another is another run."""
    text = ", ".join(f"{axis} {length}" for axis, length in lengths.items())
    return {"mesh": text} if lengths else {}


def _divided(joined: Joined, lengths: Mapping[str, int]) -> Joined:
    """Return the joined world with replicas of these lengths; raises as `Mesh.of`."""
    stages = lengths.get("stage", 1)
    tensor = lengths.get("tensor", 1)
    generation = replace(joined.group.generation, stages=stages, tensor=tensor)
    Mesh.of(generation)
    return replace(joined, group=replace(joined.group, generation=generation))


def _open_world(process: ScriptProcess, session: Session, *, default_group: bool) -> World:
    """Agree with the other ranks, connect to them and find where the run resumes; collective."""
    joined = process.joined
    _agree(process, session, default_group=default_group)
    if joined.group.local_world_size > 1:  # the cores of a machine are shared among its processes
        cores = cores_per_worker(joined.group.local_world_size)
        torch.set_num_threads(min(torch.get_num_threads(), cores))
    session.connect(joined.group, joined.store)
    run = session.run
    process.joined = replace(joined, group=run.context.world)
    if default_group:
        open_default_group(session, joined)
    session.resume()
    for note in session.start.notes if run.leads else ():
        print_message(note)
    session.record(partial(_open_trackers, session))
    world = World(process, session)
    session.answer_requests()
    return world


def _agree(process: ScriptProcess, session: Session, *, default_group: bool) -> None:
    """Lock the run's folder, and require the same arguments on all ranks; collective."""
    output = session.output
    group = process.joined.group
    store = process.joined.store
    limit = session.timeouts[0]
    if group.rank == 0:
        require_installed(output.trackers)
    # All have closed their earlier worlds.
    compare(store, group, "versions", version_facts(), timeout=limit)
    path = session.folder
    folder = None if path is None else RunFolder(path, shard_id=group.machine)
    process.folder = folder
    if folder is not None and group.local_rank == 0:
        folder.check(session.identity, anew=output.resume == "no")
        folder.open(session.identity)
        session.resources.push(folder)
        remove_records_of_machine(folder.path, group.machine)
    given = {"seed": str(session.seed), "run": "given" if path else "not given"}
    given["trace_steps"] = output.trace_steps
    given |= {"default_group": "True"} if default_group else {}
    given |= {"mesh": f"{session.identity['mesh']}"} if "mesh" in session.identity else {}
    compare(store, group, "arguments of join()", given, timeout=limit)
    if folder is not None and group.local_rank > 0:  # the first process here has opened it
        folder.hold(group.local_rank)
        session.resources.push(folder)


def _open_trackers(session: Session) -> list[Tracker]:
    """Open the trackers of a run, as its leader."""
    assert session.folder is not None
    size = session.run.context.world.size
    parameters = {**session.identity, "world_size": size, "device": session.device.type}
    return open_trackers_of(session.output, session.folder, parameters)


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
