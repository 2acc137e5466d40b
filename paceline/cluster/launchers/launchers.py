"""The table of launchers whose processes join a world: torchrun, mpirun, Slurm's srun.

A new launcher, such as PBS, is a file here that reads its variables, and a row of `LAUNCHERS`. What
the reader returns says where the rendezvous is: a launcher whose reader gives no `master` needs an
option for it, or MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from paceline.cluster.launchers.launched_process import LaunchedProcess
from paceline.cluster.launchers.mpirun import read_mpirun
from paceline.cluster.launchers.slurm import read_srun
from paceline.cluster.launchers.torchrun import read_torchrun

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
    Launcher(name="slurm", command="srun", signs=("SLURM_STEP_ID",), read=read_srun),
    Launcher(name="torchrun", command="torchrun", signs=("RANK", "WORLD_SIZE"), read=read_torchrun),
)
"""The launchers, the innermost first: torchrun and mpirun often run inside of a Slurm job. The last
row is for torchrun's variables set by hand."""


def launched_by(variables: Variables) -> LaunchedProcess | None:
    """Return what the innermost launcher says of this process; None if no launcher started it.

    Raises:
        ConfigError: its variables contradict each other, or some are missing; names them.
    """
    signed = (row for row in LAUNCHERS if any(name in variables for name in row.signs))
    return next(filter(None, (row.read(variables) for row in signed)), None)


def command_of(name: str) -> str:
    """Return the command of a launcher, `paceline launch` included."""
    commands = {launcher.name: launcher.command for launcher in LAUNCHERS}
    return {**commands, "paceline": "paceline launch"}.get(name, name)
