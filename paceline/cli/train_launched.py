"""`paceline train` as one of the processes that torchrun, mpirun or srun started.

There is no supervisor: the launcher starts, watches and ends the processes. It defines the world,
and a flag that contradicts it is refused. The first process of each machine does the supervisor's
other work: it checks the configuration and locks the run folder.

    rank 0        first of each machine              the others
    choose the run id, post it
                  check; wait for the others' checks
                  open the run folder                wait for that
    ------------------------------ train ------------------------------
"""

from __future__ import annotations

import socket
import sys
from dataclasses import replace
from pathlib import Path

import torch

from paceline.cli.notes import notes
from paceline.cli.worker import train
from paceline.cluster.environment import Environment
from paceline.cluster.join import Joined, join_world
from paceline.cluster.launchers.launchers import command_of
from paceline.cluster.print_message import print_message
from paceline.cluster.rendezvous.run_plan import RunPlan
from paceline.cluster.supervision.requests.member_record import remove_records_of_machine
from paceline.cluster.supervision.supervisor import finished_sentence
from paceline.cluster.supervision.worker import end_process
from paceline.config.train import TrainConfig
from paceline.config.world import WorldConfig
from paceline.errors import ConfigError, Message, PacelineError
from paceline.observe.last_state import last_state
from paceline.session.checks import check
from paceline.state.run_folder import RunFolder, choose_run_id

_RENDEZVOUS = ("file_store_path", "redis_host", "redis_url", "etcd", "master")
_UNNAMED = "unnamed"  # the id of a run until rank 0 chooses one


def train_launched(config: TrainConfig, environment: Environment) -> int:
    """Train as one process of another launcher's world; return the exit status.

    A process that stops or fails ends here, at once. Threads that wait for lost peers would delay
    the interpreter's shutdown, which takes torch a second of the few that a signal leaves.
    """
    sys.path.insert(0, "")  # for a user's own model, as with `python -m`
    plan = RunPlan.of(config.world, workers=1)
    launched = environment.launched
    world = config.world
    lasting = world.file_store_path or world.redis_host or world.redis_url or world.etcd
    try:
        if launched is not None and not launched.launch_id and lasting and not world.run_id:
            raise ConfigError(
                Message(
                    "{} with {--file_store_path}, Redis or etcd needs {--run_id}, the same for all "
                    "processes.",
                    command_of(launched.launcher),
                )
            )
        joined = join_world(
            environment,
            first_iter_timeout=plan.first_iter_timeout,
            timeout=plan.timeout,
            rendezvous=plan.rendezvous,
            interface_names=plan.interfaces,
        )
    except PacelineError as error:
        here = ""  # this process, as far as the launcher names it before the world is formed
        if launched is not None:
            host = socket.gethostname()
            here = f"rank {launched.rank} of {launched.world_size} on {host}: "
        print_message(f"{here}{error}")
        return error.status
    try:
        _work(config, joined)
    except SystemExit as stop:  # by a signal; the run's state is saved
        end_process(int(stop.code or 0))
    except KeyboardInterrupt:
        end_process(130)
    except BaseException as error:
        end_process(joined.process_end.fail(error))
    joined.process_end.close()
    return 0


def fitted(world: WorldConfig, joined: Joined) -> WorldConfig:
    """Return the flags completed by the launcher's numbers.

    Args:
        world: the flags, the run id among them.
        joined: the world.

    Raises:
        ConfigError: a flag contradicts the launcher; names both values.
    """
    group = joined.group
    machine = joined.group.machine
    workers = group.local_world_size
    machines = len(group.generation.workers_per_machine)
    flags = ("gpus", "num_gpus", "num_workers")
    counted = next((flag for flag in flags if _given(world, flag)), "num_workers")
    for flag, given, there, started in (
        (counted, world.workers, workers, f"{workers} on this machine"),
        ("num_shards", world.num_shards, machines, f"processes on {machines}"),
        ("shard_id", world.shard_id, machine, f"this on machine {machine}"),
    ):
        if _given(world, flag) and given != there:
            raise ConfigError(
                flag=flag,
                value=getattr(world, flag),
                rule=f"contradicts the launcher: {command_of(joined.launcher)} started {started}",
                remedy=Message(f"remove {{--{flag}}}, or start a matching number of processes"),
            )
    placed = machines == 1 or any(_given(world, flag) for flag in _RENDEZVOUS)
    return replace(
        world,
        num_shards=machines,
        shard_id=machine,
        num_workers=0 if counted in ("gpus", "num_gpus") else workers,
        master=world.master if placed else joined.rendezvous,
    )


def _work(config: TrainConfig, joined: Joined) -> None:
    group = joined.group
    limit = config.world.first_iter_timeout
    world = fitted(replace(config.world, run_id=config.world.run_id or _UNNAMED), joined)
    run_id = config.world.run_id
    config = replace(config, world=world)
    output = Path(config.output.output_dir)
    anew = config.output.resume == "no"
    if group.rank == 0 and not run_id:
        run_id = choose_run_id(output, *config.digests(), anew=anew)
    config = config.with_run_id(joined.from_rank_0("run id", run_id, limit))
    run = output / config.world.run_id
    folder = RunFolder(run, shard_id=group.machine)
    done = folder.finished_as(config.identity())
    finished = joined.from_rank_0("end of the run", str(done), limit)
    if finished == str(True):
        if group.rank == 0:
            edited = folder.edits(config.identity())
            reason = last_state(folder.path).reason
            print_message(finished_sentence(config.world.run_id, edited, reason))
        return
    with folder:
        _prepare(config, joined, folder, anew=anew)
        train(config, group, joined.store)
        if group.local_rank == 0:
            folder.finish()


def _prepare(config: TrainConfig, joined: Joined, folder: RunFolder, *, anew: bool) -> None:
    """Check on each machine, then open its folder: nothing is written before all have checked."""
    group = joined.group
    limit = config.world.first_iter_timeout
    opened = f"opened/{group.machine}"
    if group.local_rank > 0:
        joined.await_all([opened], "the first process here didn't open the run folder", limit)
        folder.hold(group.local_rank)
        return
    folder.check(config.identity(), anew=anew)
    gpus = torch.cuda.device_count()
    if gpus == 1 and not config.world.gpu_numbers:  # the scheduler shows each process its own
        gpus = group.local_world_size
    for note in [*notes(config, gpus, joined.launcher), *check(config, gpus)]:
        if group.rank == 0:
            print_message(note)
    joined.store.set(f"checked/{group.machine}", "")
    checked = [f"checked/{machine}" for machine in range(len(group.generation.workers_per_machine))]
    joined.await_all(checked, "some machines didn't finish checking their configuration", limit)
    folder.open(config.identity(), config.started())
    remove_records_of_machine(folder.path, group.machine)
    joined.store.set(opened, "")


def _given(world: WorldConfig, flag: str) -> bool:
    return bool(getattr(world, flag) != getattr(WorldConfig, flag))
