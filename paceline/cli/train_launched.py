"""`paceline train` as one of the processes that torchrun, mpirun or srun started.

There is no supervisor here: the launcher starts, watches and ends the processes. What it says of
the world counts, and a flag that says otherwise is refused. The first process of each machine does
what a supervisor does else: it checks, and holds the run's folder.

    rank 0        first of each machine              the others
    choose the run id, tell it
                  check; wait for the others' checks
                  open the run's folder              wait for that
    ------------------------------ train ------------------------------
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch

from paceline import wiring as build
from paceline.cli.notes import notes
from paceline.cli.worker import train
from paceline.cluster.environment import Environment
from paceline.cluster.join import Joined, join_world_of
from paceline.cluster.launchers.launched_process import LaunchedProcess
from paceline.cluster.launchers.launchers import command_of
from paceline.cluster.rendezvous.run_plan import RunPlan
from paceline.cluster.supervision.supervisor import finished_sentence, say
from paceline.config.train import TrainConfig
from paceline.config.world import WorldConfig
from paceline.errors import ConfigError, PacelineError
from paceline.state.run_folder import RunFolder, choose_run_id

_PLACES = ("file_store_path", "redis_host", "redis_url", "master")
_UNNAMED = "unnamed"  # a run until rank 0 has chosen its id, which isn't part of its identity


def train_launched(config: TrainConfig, environment: Environment) -> int:
    """Train as one process of another launcher's world; return the exit status.

    A process that stops or fails ends here, at once: threads that wait for lost peers would keep
    it, and the interpreter's farewell takes torch a second of the few that a signal leaves.
    """
    sys.path.insert(0, "")  # somebody's own model is found where they stand, as by `python -m`
    plan = RunPlan.of(config.world, workers=1)
    try:
        _require_run_id(config.world, environment.launched)
        joined = join_world_of(
            environment,
            first_iter_timeout=plan.first_iter_timeout,
            timeout=plan.timeout,
            meeting=plan.meeting,
            wanted=plan.interfaces,
        )
    except PacelineError as error:
        say(f"{_here(environment.launched)}{error}")
        return error.status
    try:
        _work(config, joined)
    except SystemExit as stop:  # by a signal; the run's state is saved
        _end(int(stop.code or 0))
    except KeyboardInterrupt:
        _end(130)
    except BaseException as error:
        _end(joined.ending.fail(error))
    joined.ending.close()
    return 0


def fitted(world: WorldConfig, joined: Joined) -> WorldConfig:
    """Return the flags with what the launcher says filled in.

    Args:
        world: the flags, the run id among them.
        joined: the world as it stands.

    Raises:
        ConfigError: a flag says otherwise; names both.
    """
    members, counted = joined.members, _flag_of_workers(world)
    workers, machines = members.local_world_size, len(members.machines)
    started = command_of(joined.launcher) + " started"
    if counted and world.workers != workers:
        raise _contradiction(world, counted, f"{started} {workers} on this machine")
    if _given(world, "num_shards") and world.num_shards != machines:
        raise _contradiction(world, "num_shards", f"{started} processes on {machines}")
    if _given(world, "shard_id") and world.shard_id != members.machine:
        raise _contradiction(world, "shard_id", f"{started} this as number {members.machine}")
    placed = machines == 1 or any(_given(world, flag) for flag in _PLACES)
    return replace(
        world,
        num_shards=machines,
        shard_id=members.machine,
        num_workers=0 if counted in ("gpus", "num_gpus") else workers,
        master=world.master if placed else joined.meeting,
    )


def _work(config: TrainConfig, joined: Joined) -> None:
    members, limit = joined.members, config.world.first_iter_timeout
    world = fitted(replace(config.world, run_id=config.world.run_id or _UNNAMED), joined)
    config, run_id = replace(config, world=world), config.world.run_id
    output, anew = Path(config.output.output_dir), config.output.resume == "no"
    if members.rank == 0 and not run_id:
        run_id = choose_run_id(output, config.digest(), anew=anew)
    config = config.with_run_id(joined.from_rank_0("run id", run_id, limit))
    folder = RunFolder(output / config.world.run_id, shard_id=members.machine)
    finished = joined.from_rank_0("end of the run", str(folder.finished), limit)
    if finished == str(True):
        if members.rank == 0:
            say(finished_sentence(config.world.run_id))
        return
    with closing(folder):
        _prepare(config, joined, folder, anew=anew)
        train(config, members, joined.store, joined.token)
        if members.local_rank == 0:
            folder.finish()


def _prepare(config: TrainConfig, joined: Joined, folder: RunFolder, *, anew: bool) -> None:
    """Check on each machine, then hold its folder: nothing is written before all have checked."""
    members, limit = joined.members, config.world.first_iter_timeout
    opened = f"opened/{members.machine}"
    if members.local_rank > 0:
        joined.await_all([opened], "the first process of this machine didn't open the run", limit)
        return
    folder.check(config.identity(), anew=anew)
    gpus = torch.cuda.device_count()
    if gpus == 1 and not config.world.gpu_numbers:  # the scheduler shows each process its own
        gpus = members.local_world_size
    for note in [*notes(config, gpus, joined.launcher), *build.check(config, gpus)]:
        if members.rank == 0:
            say(note)
    joined.store.set(f"checked/{members.machine}", "")
    checked = [f"checked/{machine}" for machine in range(len(members.machines))]
    joined.await_all(checked, "some machines didn't check their part of the run", limit)
    folder.open(config.identity())
    joined.store.set(opened, "")


def _require_run_id(world: WorldConfig, launched: LaunchedProcess | None) -> None:
    """Require a run id in a lasting store, unless the launcher names the start."""
    lasting = world.file_store_path or world.redis_host or world.redis_url
    if launched is not None and not launched.start and lasting and not world.run_id:
        raise ConfigError(
            f"Processes of {command_of(launched.launcher)} that meet in a folder or in Redis need "
            "--run_id, the same for all."
        )


def _flag_of_workers(world: WorldConfig) -> str:
    """Return the flag that gives the number of workers, or ""."""
    flags = ("gpus", "num_gpus", "num_workers")
    return next((flag for flag in flags if _given(world, flag)), "")


def _given(world: WorldConfig, flag: str) -> bool:
    return bool(getattr(world, flag) != getattr(WorldConfig, flag))


def _contradiction(world: WorldConfig, flag: str, started: str) -> ConfigError:
    return ConfigError(
        f"--{flag} {getattr(world, flag)}, but {started}: what the launcher starts counts; leave "
        f"out --{flag}, or start as many as it says."
    )


def _end(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _here(launched: LaunchedProcess | None) -> str:
    """Name this process, as far as it is known before the world stands."""
    if launched is None:
        return ""
    return f"rank {launched.rank} of {launched.world_size} on {socket.gethostname()}: "
