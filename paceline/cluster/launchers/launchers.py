"""The table of launchers whose processes join a world: torchrun, mpirun, Slurm's srun.

A new launcher, such as PBS, is a file here that reads its variables, and a row of `LAUNCHERS`. What
the reader returns says where the processes meet: a reader that gives no `master` needs an option
for it, or MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from paceline.cluster.launchers.launched_process import LaunchedProcess
from paceline.cluster.launchers.mpirun import by_mpirun, read_mpirun
from paceline.cluster.launchers.slurm import by_srun, read_srun
from paceline.cluster.launchers.torchrun import by_hand, by_torchrun, read_torchrun

Variables = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """One launcher of processes.

    Attributes:
        name: its name in a run's records.
        command: its command, for messages.
        started: returns whether it started this process, by environment variables.
        read: reads the variables.
    """

    name: str
    command: str
    started: Callable[[Variables], bool]
    read: Callable[[Variables], LaunchedProcess]


LAUNCHERS = (
    Launcher(name="torchrun", command="torchrun", started=by_torchrun, read=read_torchrun),
    Launcher(name="mpirun", command="mpirun", started=by_mpirun, read=read_mpirun),
    Launcher(name="slurm", command="srun", started=by_srun, read=read_srun),
    Launcher(name="torchrun", command="torchrun", started=by_hand, read=read_torchrun),
)
"""The launchers, the innermost first: torchrun and mpirun often run inside of a Slurm job. The last
row is for torchrun's variables set by hand."""


def launched_by(variables: Variables) -> LaunchedProcess | None:
    """Return what the innermost launcher says of this process; None if no launcher started it.

    Raises:
        ConfigError: its variables contradict each other, or some are missing; names them.
    """
    rows = (launcher for launcher in LAUNCHERS if launcher.started(variables))
    launcher = next(rows, None)
    return None if launcher is None else launcher.read(variables)


def command_of(name: str) -> str:
    """Return the command of a launcher, `paceline launch` included."""
    commands = {launcher.name: launcher.command for launcher in LAUNCHERS}
    return {**commands, "paceline": "paceline launch"}.get(name, name)
