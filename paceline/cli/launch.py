"""`paceline launch`: runs a user's command in local workers, under the supervisor of `train`.

Each worker learns its rank by `paceline.join()`. A command that ends well in several workers
without having joined has failed: they worked apart. The workers start together and end together:
with the first failure, a signal, or the supervisor's end.
"""

from __future__ import annotations

import shutil
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from paceline.cli.flags import parse, takes
from paceline.cli.server_command import server_command
from paceline.cluster.environment import note_for_supervisor
from paceline.cluster.print_message import print_message
from paceline.cluster.rendezvous.run_plan import RunPlan
from paceline.cluster.rendezvous.server_registration import PARAMETERS
from paceline.cluster.supervision import parent_death_watchdog as parent_death_watchdog
from paceline.cluster.supervision.machine_endpoint import MachineEndpoint
from paceline.cluster.supervision.supervisor import supervise
from paceline.config.launch import LaunchConfig
from paceline.errors import ConfigError

DESCRIPTION = """\
Run your own command in several workers: paceline launch -n 2 -- COMMAND.

Flags of `paceline launch` end at -- or at the first argument that isn't a flag.

Without -n (--num_workers): one worker per GPU, or one worker without GPUs.

examples:
  a script that calls paceline.join(), in two workers:
    paceline launch -n 2 -- python train.py --epochs 3
  two machines with two workers each and a shared folder
  (on the second machine, give --shard_id 1):
    paceline launch -n 2 --num_shards 2 --shard_id 0 --run_id first
        --file_store_path /shared/meet -- python train.py
  two workers and a parameter server, for a script with sync="server":
    paceline launch -n 2 --num_servers 1 -- python train.py
"""
_EXAMPLE = "paceline launch -n 2 -- python train.py"


def main(argv: Sequence[str]) -> int:
    """Run the command with the arguments after its name; return its exit status.

    Raises:
        PacelineError: a mistake of the caller, reported before anything starts.
    """
    flags, command = split(argv)
    config = parse(LaunchConfig, flags, prog="paceline launch", description=DESCRIPTION)
    if not command:
        raise ConfigError(f"there is no command: give one, as in {_EXAMPLE}.")
    if shutil.which(command[0]) is None:
        what = "isn't executable" if Path(command[0]).exists() else "isn't found"
        raise ConfigError(f"the command {command[0]} {what}: give a program, as in {_EXAMPLE}.")
    world = config.world
    counted = world.gpus or world.num_gpus or world.num_workers or world.use_cpu
    workers = world.workers if counted else max(1, torch.cuda.device_count())
    plan = RunPlan.of(world, workers=workers)
    guarded = [sys.executable, "-I", "-S", parent_death_watchdog.__file__, *command]
    plan = replace(plan, runs_command=True, requires_join=True)
    if note := note_for_supervisor(plan.machines, plan.workers):
        print_message(note)
    servers = None
    if config.num_servers and plan.machine == 0:
        servers = server_command(PARAMETERS, config.num_servers)
    return supervise(plan, guarded, servers=servers, open_endpoint=MachineEndpoint)


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the flags with their values, `-n` as `--num_workers`, and the command after them."""
    words = deque(argv)
    flags = list[str]()
    while words and words[0].startswith("-") and words[0] != "--":
        flag = words.popleft()
        flags.append("--num_workers" if flag == "-n" else flag)
        if words and takes(LaunchConfig, flag, words[0]):
            flags.append(words.popleft())
    if words and words[0] == "--":
        words.popleft()
    return flags, list(words)
