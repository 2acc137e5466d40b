"""Processes that would train apart from each other without knowing: what shows that they do.

    a launcher whose variables aren't read (horovodrun, PMI, …)        refused
    a child of multiprocessing that no launcher describes              refused, or a note
    several agents of torchrun, each with a world of its own           a note

A note is for what a user may mean: independent trainings, say. Slurm's cases are in `slurm.py`.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.cluster.launchers.launched_process import LaunchedProcess


@dataclass(frozen=True, kw_only=True)
class UnreadLauncher:
    """A launcher that numbers its processes, and whose variables name no rendezvous.

    Attributes:
        command: the launcher's command, for messages.
        rank_name: its variable of the rank.
        size_name: its variable of the world size; "" if there is none.
    """

    command: str
    rank_name: str
    size_name: str


UNREAD = tuple(
    UnreadLauncher(command=command, rank_name=rank, size_name=size)
    for command, rank, size in (
        ("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE"),
        ("bpslaunch", "DMLC_WORKER_ID", "DMLC_NUM_WORKER"),
        ("flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
        ("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
        ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("MVAPICH's mpirun_rsh", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        ("MVAPICH's mpirun_rsh", "MVP_COMM_WORLD_RANK", "MVP_COMM_WORLD_SIZE"),
        ("aprun", "ALPS_APP_PE", ""),
        ("PALS's mpiexec", "PALS_RANKID", ""),
        ("pbsdsh", "PBS_VNODENUM", ""),
        ("a launcher with PMI", "PMI_RANK", "PMI_SIZE"),
        ("a launcher with PMIx", "PMIX_RANK", "PMIX_SIZE"),
        ("a launcher", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    )
)
"""Launchers that are detected so that their processes don't train apart; the first that fits
counts. A launcher that is to be supported is a row of `launchers.LAUNCHERS` instead."""


def unread_launcher(variables: Mapping[str, str], *, in_srun_shell: bool) -> str:
    """Return a sentence on a launcher that started this process as one of several; "" if none did.

    Args:
        variables: the environment.
        in_srun_shell: the process is in the shell of `srun --pty`; Slurm's PMI variables say then
            how many tasks have no shell.
    """
    for row in UNREAD:
        rank = _number(variables, row.rank_name)
        size = _number(variables, row.size_name)
        # Slurm sets these in the shell of `srun --pty`,
        # too, whose processes are meant to train alone.
        of_slurm = in_srun_shell and row.rank_name.startswith("PMI")
        if (rank > 0 or size > 1) and not of_slurm:
            names = [name for name in (row.rank_name, row.size_name) if name in variables]
            given = " and ".join(f"{name} {variables[name]}" for name in names)
            count = str(size) if size > 1 else "several"
            number = str(size) if size > 1 else "N"
            return (
                f"{given}: {row.command} started this process as one of {count}, by variables that "
                "Paceline doesn't read, so each process would train alone. Start them with "
                f"`paceline launch -n {number} -- COMMAND` or torchrun instead; if each is to "
                f"train alone, unset {' and '.join(names)}."
            )
    return ""


def apart_agents(
    variables: Mapping[str, str], launched: LaunchedProcess, outer: LaunchedProcess, command: str
) -> str:
    """Return a note on torchrun's agents that another launcher started, as worlds of their own.

    Args:
        variables: the environment.
        launched: this process, as torchrun describes it.
        outer: torchrun's agent, as its launcher describes it.
        command: that launcher's command.

    Returns:
        the note; "" where the agents are one world.
    """
    agents = max(1, _number(variables, "GROUP_WORLD_SIZE"))
    if outer.world_size <= agents:
        return ""
    return (
        f"{command} started torchrun {outer.world_size} times, and this world has "
        f"{agents} of them and {launched.world_size} in all of its processes (GROUP_WORLD_SIZE, "
        "WORLD_SIZE): the worlds train apart. To train together, give torchrun --nnodes "
        f"{outer.world_size} and a common --rdzv-endpoint, or start the script by {command} alone."
    )


def spawned_refusal() -> str:
    """Return why a process that torch's `spawn` started must not be a world of its own.

    Returns:
        a sentence; "" in any other process.
    """
    target = getattr(multiprocessing.current_process(), "_target", None)
    if getattr(target, "__module__", "") != "torch.multiprocessing.spawn":
        return ""
    return (
        "this process was started by torch.multiprocessing.spawn(), and no launcher describes it, "
        f"so it would be a world of one and train alone: {_SPAWN_REMEDY}."
    )


def spawned_note() -> str:
    """Return a note on a process that multiprocessing started; "" if it didn't."""
    if multiprocessing.parent_process() is None:
        return ""
    return (
        "this process was started by multiprocessing and is a world of one: it trains alone. To "
        f"train with others, {_SPAWN_REMEDY}."
    )


_SPAWN_REMEDY = (
    "start the script with `paceline launch -n 2 -- python …`, without multiprocessing, or call "
    "paceline.launch(train, …, workers=2) in its place"
)


def _number(variables: Mapping[str, str], name: str) -> int:
    """Return a variable's value; 0 where it isn't set, or no number."""
    text = variables.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() else 0
