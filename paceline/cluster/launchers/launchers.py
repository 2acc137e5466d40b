"""The table of launchers whose processes join a world: torchrun, mpirun, Slurm's srun.

A new launcher, such as PBS, is a file here that reads its variables, and a row of `LAUNCHERS`. What
the reader returns says where the rendezvous is: a launcher whose reader gives no `master` needs an
option for it, or MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from paceline.cluster.launchers.apart import apart_agents, spawned_note, unread_launcher
from paceline.cluster.launchers.launched_process import LaunchedProcess
from paceline.cluster.launchers.mpirun import read_mpirun
from paceline.cluster.launchers.slurm import in_srun_shell, note_on_allocation, read_srun
from paceline.cluster.launchers.torchrun import read_torchrun
from paceline.errors import ConfigError

Variables = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """A supported launcher of processes, such as torchrun or mpirun.

    Attributes:
        name: the launcher's name in a run's records.
        command: the launcher's command, for messages.
        signs: environment variables by which the launcher is detected; it is detected if at least
            one of them is set.
        read: reads the launcher's variables; returns None unless the launcher started this process
            as one of several.
    """

    name: str
    command: str
    signs: tuple[str, ...]
    read: Callable[[Variables], LaunchedProcess | None]


LAUNCHERS = (
    Launcher(
        name="torchrun", command="torchrun", signs=("TORCHELASTIC_RUN_ID",), read=read_torchrun
    ),
    Launcher(
        name="mpirun",
        command="mpirun",
        signs=("MPI_LOCALRANKID", "OMPI_COMM_WORLD_RANK"),
        read=read_mpirun,
    ),
    Launcher(name="slurm", command="srun", signs=("SLURM_STEP_ID", "SLURM_PROCID"), read=read_srun),
    Launcher(name="torchrun", command="torchrun", signs=("RANK", "WORLD_SIZE"), read=read_torchrun),
)
"""The launchers, the innermost first: torchrun and mpirun often run inside of a Slurm job. The last
row is for torchrun's variables set by hand."""


def launched_by(variables: Variables) -> LaunchedProcess | None:
    """Return what the innermost launcher says of this process; None if no launcher started it.

    Raises:
        ConfigError: its variables contradict each other, some are missing, or a launcher whose
            variables aren't read started this process as one of several; names them.
    """
    launched = next(filter(None, (row.read(variables) for row in _detected(variables))), None)
    if launched is None and (sentence := unread_by(variables)):
        raise ConfigError(sentence)
    return launched


def unread_by(variables: Variables) -> str:
    """Return a sentence on a launcher of several processes whose variables aren't read, or ""."""
    return unread_launcher(variables, in_srun_shell=in_srun_shell(variables))


def note_on(variables: Variables, launched: LaunchedProcess | None) -> str:
    """Return a note on a process that may train alone, or in a world that is too small; or "".

    Args:
        variables: the environment.
        launched: what `launched_by` returned.
    """
    if launched is None:
        return spawned_note() or note_on_allocation(variables)
    innermost, *outer = _detected(variables)
    if launched.launcher == "torchrun" and innermost.signs[0] in variables:
        for row in outer:
            # The outer launcher's variables may be incomplete
            # here: torchrun passes some on, and not others.
            with suppress(ConfigError):  # other variables than those of this process count
                agent = row.read(variables)
                if row.name != "torchrun" and agent is not None:
                    return apart_agents(variables, launched, agent, row.command)
    return spawned_note() if launched.world_size == 1 else ""


def to_be_unset(launcher: str) -> str:
    """Return how to start a process without a launcher's variables: `env -u NAME …`."""
    signs = [name for row in LAUNCHERS if row.name == launcher for name in row.signs]
    return f"env {' '.join(f'-u {name}' for name in signs)} …"


def _detected(variables: Variables) -> list[Launcher]:
    return [row for row in LAUNCHERS if any(name in variables for name in row.signs)]


def command_of(name: str) -> str:
    """Return the command of a launcher, `paceline launch` included."""
    commands = {launcher.name: launcher.command for launcher in LAUNCHERS}
    return {**commands, "paceline": "paceline launch"}.get(name, name)
