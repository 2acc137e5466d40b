"""`paceline train`: a supervisor on each machine, and the workers that it starts.

Both have the same command line; environment variables give a worker its rank. The supervisor
checks the configuration before anything is written, and locks the run folder. A process of another
launcher is a worker without a supervisor: see `train_launched`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch._C._distributed_c10d import Store

from paceline.cli.config_file import with_file
from paceline.cli.flags import parse
from paceline.cli.notes import notes
from paceline.cli.server_command import server_command
from paceline.cli.train_launched import train_launched
from paceline.cli.worker import train
from paceline.cluster.environment import WorkerEnvironment, read_environment
from paceline.cluster.membership.generation import Group
from paceline.cluster.print_message import print_message
from paceline.cluster.rendezvous.formed_run import FormedRun, finish_orphaned
from paceline.cluster.rendezvous.machine_rendezvous import answer_finished
from paceline.cluster.rendezvous.registered_machine import deregister_orphaned
from paceline.cluster.rendezvous.run_plan import RunPlan
from paceline.cluster.rendezvous.server_registration import AVERAGING, PARAMETERS
from paceline.cluster.stores.waiting import call_with_timeout
from paceline.cluster.supervision.machine_endpoint import MachineEndpoint
from paceline.cluster.supervision.requests.member_record import (
    remove_ended_records,
    remove_records_of_machine,
)
from paceline.cluster.supervision.requests.run_presence import RunPresence
from paceline.cluster.supervision.requests.run_status import RunStatus
from paceline.cluster.supervision.server_command import ServerCommand
from paceline.cluster.supervision.supervisor import finished_sentence, supervise
from paceline.cluster.supervision.worker import is_orphaned, run_worker
from paceline.config.train import TrainConfig
from paceline.errors import ConfigError, Message
from paceline.observe.last_state import last_state
from paceline.session.checks import check
from paceline.state.run_folder import RunFolder, choose_run_id

DESCRIPTION = """Train a model on the GPUs or CPUs of one machine, or of several.

examples:
  two CPU workers, a small ResNet, images of 32 x 32 pixels:
    paceline train --train_data cifar-train --test_data cifar-test
        --model resnet20 --image_size 32 --augment pad --num_labels 10
        --batch_size 128 --num_workers 2
  two machines with two GPUs each and a shared folder
  (on the second machine, give --shard_id 1):
    paceline train --train_data train-lmdb --test_data test-lmdb --num_gpus 2
        --num_shards 2 --shard_id 0 --run_id first
        --file_store_path /shared/meet
  the same with a Redis server, and Caffe2's command name:
    resnet50_trainer --train_data train-lmdb --num_gpus 2 --num_shards 2
        --shard_id 0 --run_id first --redis_host redis.lab
  the flags of another run, with another learning rate:
    paceline train --config runs/first/config.toml --base_learning_rate 0.05
  two workers that torchrun starts (likewise srun -n 2 and mpirun -n 2):
    torchrun --nproc-per-node 2 --no-python
        paceline train --train_data train-lmdb
"""

_DEREGISTER_S = 5.0


def main(argv: Sequence[str], prog: str = "paceline train") -> int:
    """Run the command with the arguments after its name, `prog`; return its exit status.

    Raises:
        PacelineError: a mistake of the caller, reported before anything is written.
    """
    argv = with_file(argv, TrainConfig)
    if prog == "resnet50_trainer":
        argv = ["--max_loss_at", "epoch", *argv]  # first, so that the user's own is what counts
    config = parse(TrainConfig, argv, prog=prog, description=DESCRIPTION)
    environment = read_environment()
    worker = environment.worker
    if worker is not None and not worker.runs_command:
        config = config.with_run_id(worker.run_id)
        run_worker(
            worker, partial(_work, config, worker), Path(config.output.output_dir, worker.run_id)
        )
        return 0
    if worker is not None or environment.launched is not None:
        return train_launched(config, environment)
    return _supervise(config, argv, environment.note)


def _supervise(config: TrainConfig, argv: Sequence[str], note: str) -> int:
    """Start this machine's workers.

    Args:
        config: the flags.
        argv: the same, as text.
        note: what a run of one worker must say, or "".
    """
    sys.path.insert(0, "")  # for a user's own model, as with `python -m`
    gpus = torch.cuda.device_count()
    output = Path(config.output.output_dir)
    anew = config.output.resume == "no"
    run_id = config.world.run_id or choose_run_id(output, *config.digests(), anew=anew)
    config = config.with_run_id(run_id)
    folder = RunFolder(output / run_id, shard_id=config.world.shard_id)
    folder.check(config.identity(), anew=anew)
    _check_server(config)
    begun = folder.begun_as(config.identity())
    plan = replace(RunPlan.of(config.world, workers=config.world.workers), begun=begun)
    if folder.finished_as(config.identity()):
        reason = last_state(folder.path).reason
        print_message(finished_sentence(run_id, folder.edits(config.identity()), reason))
        if plan.machine == 0 and plan.machines > 1:
            if not folder.confirmed:  # by another machine, in a folder that all share
                folder.finish()
            answer_finished(plan)
        return 0
    alone = [note] if note and plan.machines * plan.workers == 1 else []
    for text in [*alone, *notes(config, gpus), *check(config, gpus)]:
        print_message(text)
    command = [sys.executable, "-m", "paceline.cli.main"]
    with ExitStack() as stack:

        def formed(run: FormedRun) -> None:
            folder.open(config.identity(), config.started())
            stack.callback(folder.close)
            stack.callback(remove_ended_records, folder.path, plan.machine)
            remove_records_of_machine(folder.path, plan.machine)
            presence = RunPresence(
                folder.path,
                id=f"supervisor-{plan.machine}",
                role="supervisor",
                machine=plan.machine,
                report=lambda: RunStatus.of(run.generation, None),
            )
            stack.callback(presence.close)

        status = supervise(
            plan,
            [*command, "train", *argv],
            formed=formed,
            finish=folder.finish,
            open_endpoint=MachineEndpoint,
            servers=_servers(config) if plan.machine == 0 else None,
        )
        if status == ConfigError.status:
            folder.discard()
        return status


def _work(config: TrainConfig, environment: WorkerEnvironment, group: Group, store: Store) -> None:
    """Train as a supervised worker, which holds the run folder as long as it lives.

    Where the supervisor was killed, the workers do at the end what it would have done.
    """
    path = Path(config.output.output_dir, config.world.run_id)
    folder = RunFolder(path, shard_id=group.machine)
    try:
        folder.hold(group.local_rank)
        last = train(config, group, store, survives=True)
        if last.on_machine().ranks[0] == last.rank and is_orphaned(environment):
            finish_orphaned(environment.store, last, folder.finish)
    finally:
        if is_orphaned(environment):
            remove_ended_records(path, group.machine)
            if folder.close():
                deregister = partial(deregister_orphaned, environment.store, group.machine)
                call_with_timeout(_DEREGISTER_S, deregister)
        folder.close()


def _servers(config: TrainConfig) -> ServerCommand | None:
    """Return the command of the servers that machine 0 starts; None: there are none."""
    if config.sync.sync == "server" and config.sync.parameter_servers == "run":
        return server_command(PARAMETERS, config.sync.num_servers)
    if config.average.average_through == "server" and config.average.average_server == "run":
        return server_command(AVERAGING, 1)
    return None


def _check_server(config: TrainConfig) -> None:
    """Require that a server that runs apart can find the run."""
    flags = {
        "average_server": config.average.average_server,
        "parameter_servers": config.sync.parameter_servers,
    }
    apart = next((flag for flag, place in flags.items() if place == "apart"), None)
    if apart is not None and RunPlan.of(config.world, workers=1).rendezvous is None:
        raise ConfigError(
            flag=apart,
            value="apart",
            rule="the server finds the run by a rendezvous",
            remedy=Message(
                "add {--file_store_path}, {--redis_host}, {--redis_url}, {--etcd} or {--master}, "
                f"and give paceline serve the same, or leave out {{--{apart}}}"
            ),
        )
