"""`join`: this process's world, whoever started it, and the run that goes on there.

launcher ── place ── folder of the run ── what must agree ── connections ── newest checkpoint
"""

from __future__ import annotations

import signal
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from paceline.api.argument_names import as_arguments, in_python
from paceline.api.exit_handler import ExitHandler
from paceline.api.session import Link, Session
from paceline.api.world import World
from paceline.cluster.environment import Environment, read_environment
from paceline.cluster.join import Joined, join_world_of
from paceline.cluster.membership.members import Members
from paceline.cluster.rendezvous.preflight import version_facts
from paceline.cluster.supervision.stop_signals import StopSignals
from paceline.cluster.supervision.supervisor import saved_sentence, say
from paceline.comm.communicator import Communicator
from paceline.config.rules import positive
from paceline.config.run import OutputConfig
from paceline.errors import ConfigError
from paceline.observe.event_file import EventFile
from paceline.observe.step_account import StepAccount
from paceline.observe.trace.step_trace import Trace
from paceline.recorder import NullRecorder, Recorder
from paceline.state.run_folder import RunFolder
from paceline.wiring import Start, build_trace, cores_per_worker, find_start

_FIRST_TIMEOUT, _TIMEOUT = 1200.0, 60.0  # seconds, as the commands have them


def join(
    run: str | Path | None = None,
    *,
    resume: str | Path = "auto",
    checkpoint_steps: int = 0,
    checkpoint_minutes: float = 5.0,
    keep_checkpoints: int = 2,
    trace_steps: str = "",
    seed: int = 0,
    device: str | torch.device | None = None,
    first_iter_timeout: float | None = None,
    timeout: float | None = None,
) -> World:
    """Take this process's place among those that were started with it; collective.

    Works under `paceline launch`, torchrun, mpirun and Slurm's srun, and in a process that was
    started alone, which is a world of one rank.

    Args:
        run: the folder of the run, for its events and checkpoints; None: nothing is written.
        resume: "auto" goes on from the run's newest checkpoint, if there is one; "no" begins a new
            run; anything else is the path of another run's checkpoint to start from.
        checkpoint_steps: save every so many steps; 0 goes by time and epochs only.
        checkpoint_minutes: save every so many minutes, besides at each epoch's end; 0 is off.
        keep_checkpoints: how many to keep, the newest ones.
        trace_steps: trace these steps of the run, "FIRST:LAST", counted from 0, into its folder.
        seed: of the data's order and of the random streams of each step.
        device: where to compute; by default the GPU of this process's local rank, where there is
            one, else the CPU.
        first_iter_timeout: seconds to wait for all processes, and for the first step; by default
            what the launcher was told, or 1,200.
        timeout: seconds to wait for another process in any later step; by default what the
            launcher was told, or 60.

    Raises:
        ConfigError: an argument breaks a rule, processes don't agree, or the run is alive.
        CheckpointError: there are checkpoints, and none can be read.
        CommError: a process didn't come in time, or can't be reached.
    """
    if ExitHandler.spoken_for():
        raise ConfigError(
            "paceline.join() was called before, and its world stands: join once and hand the world "
            "on, or close() it first."
        )
    with in_python():
        environment = read_environment()
        exit_handler = ExitHandler(environment)
        told = (_FIRST_TIMEOUT, _TIMEOUT)
        if environment.worker is not None:
            told = (environment.worker.first_iter_timeout, environment.worker.timeout)
        first = told[0] if first_iter_timeout is None else first_iter_timeout
        later = told[1] if timeout is None else timeout
        positive("first_iter_timeout", first)
        positive("timeout", later)
        output = OutputConfig(
            resume=str(resume),
            checkpoint_steps=checkpoint_steps,
            checkpoint_minutes=checkpoint_minutes,
            keep_checkpoints=keep_checkpoints,
            trace_steps=trace_steps,
        )
        if run is None and trace_steps:
            raise ConfigError(
                f"trace_steps {trace_steps} needs a run: give join() its folder, run=…."
            )
        if run is None and output.resume not in ("auto", "no"):
            raise ConfigError(f"resume {resume} needs a run: give join() its folder, run=….")
        asked = _Asked(
            run=None if run is None else Path(run),
            output=output,
            seed=seed,
            device=device,
            first_timeout=first,
            timeout=later,
        )
        resources = ExitStack()
        try:
            return _join(environment, exit_handler, asked, resources)
        except BaseException:
            exit_handler.standing = False
            resources.__exit__(*sys.exc_info())
            raise


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """The arguments of `join`, checked."""

    run: Path | None
    output: OutputConfig
    seed: int
    device: str | torch.device | None
    first_timeout: float
    timeout: float

    @property
    def identity(self) -> dict[str, object]:
        """What makes the run this one."""
        return {"seed": self.seed}


def _join(
    environment: Environment, exit_handler: ExitHandler, asked: _Asked, resources: ExitStack
) -> World:
    first, run = asked.first_timeout, asked.run
    joined = join_world_of(environment, first_iter_timeout=first, timeout=asked.timeout)
    members = joined.members
    device = _device(asked.device, members)
    link = Link(joined=joined, device=device, first_timeout=first, timeout=asked.timeout)
    exit_handler.stand(joined)
    if run is not None and members.local_rank == 0:
        resources.callback(_held(run, asked, members).close)
    link.agree("versions", version_facts())
    told = {"run": "given" if run else "not given", "trace_steps": asked.output.trace_steps}
    link.agree("arguments of join()", {**asked.identity, **told})
    _share_cores(members)
    communicator = link.connect("steps", resources)
    start, recorder, trace = _begun(run, asked, members, communicator, device)
    resources.callback(recorder.close)
    session = Session(
        link=link,
        communicator=communicator,
        run=run,
        output=asked.output,
        identity=asked.identity,
        recorder=recorder,
        trace=trace,
        signals=StopSignals(partial(_say_stopped, joined, run)),
        exit_handler=exit_handler,
        resources=resources,
    )
    return World(session, start)


def _say_stopped(joined: Joined, run: Path | None, number: signal.Signals) -> None:
    """Say that the run stops, once, where no supervisor of ours does."""
    if run is not None and joined.members.rank == 0 and joined.launcher != "paceline":
        say(f"stopped by {number.name}: {saved_sentence(run)}")


def _begun(
    run: Path | None,
    asked: _Asked,
    members: Members,
    communicator: Communicator,
    device: torch.device,
) -> tuple[Start, Recorder, Trace | None]:
    """Find where a run goes on, and tell."""
    if run is None:
        return Start(), NullRecorder(), None
    start = find_start(asked.output, run, asked.identity, communicator, device)
    for note in start.notes if members.rank == 0 else ():
        say(note)
    run.mkdir(parents=True, exist_ok=True)  # of a machine whose first rank isn't rank 0
    trace = build_trace(asked.output, members, run, communicator, device, _say_in_python)
    return start, StepAccount(EventFile(run, members.rank), trace=trace), trace


def _say_in_python(text: str) -> None:
    say(as_arguments(text))


def _device(given: str | torch.device | None, members: Members) -> torch.device:
    """Choose the device of a process.

    Raises:
        ConfigError: there are fewer GPUs than processes on this machine.
    """
    gpus = torch.cuda.device_count()
    if given is not None:
        device = torch.device(given)
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(f"device is {device}; ranks exchange on cpu and cuda: give one.")
        if device.type == "cuda" and (device.index or 0) >= gpus:
            raise ConfigError(f"device is {device}, and this machine shows {gpus} GPUs.")
    elif gpus == 0:
        device = torch.device("cpu")
    elif gpus == 1 or members.local_rank < gpus:  # of several processes, each may see its own only
        device = torch.device("cuda", min(members.local_rank, gpus - 1))
    else:
        raise ConfigError(
            f"{members.local_world_size} processes share the {gpus} GPUs of this machine: start "
            "one for each GPU, or give device='cpu'."
        )
    if device.type == "cuda":
        device = torch.device("cuda", members.local_rank if device.index is None else device.index)
        torch.cuda.set_device(device)
    return device


def _held(run: Path, asked: _Asked, members: Members) -> RunFolder:
    """Hold the run's folder on this machine."""
    folder = RunFolder(run, shard_id=members.machine)
    folder.check(asked.identity, anew=asked.output.resume == "no")
    folder.open(asked.identity)
    return folder


def _share_cores(members: Members) -> None:
    """Share this machine's cores among its processes, as far as nobody else has."""
    if members.local_world_size > 1:
        cores = cores_per_worker(members.local_world_size)
        torch.set_num_threads(min(torch.get_num_threads(), cores))
