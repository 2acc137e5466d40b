"""One process of a launcher (torchrun, mpirun, Slurm's srun), by the environment variables it set.

Each launcher has variables of its own, and a file here that reads them. All have four numbers:
rank, world size, and both on the machine. `read_numbers` has the rules that the numbers obey.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LaunchedProcess:
    """One process among those that a launcher started.

    Attributes:
        launcher: the launcher's name in `LAUNCHERS`.
        rank: the rank that the launcher gave the process. Paceline numbers ranks machine by
            machine, so the process's rank in the world may differ.
        world_size: the number of processes that the launcher started.
        local_world_size: the number of processes that the launcher started on this machine.
        node: the launcher's number for the machine, if the launcher numbers machines.
        launch_id: an identifier of this launch of the job, different from that of any other launch;
            "" if the launcher gives none.
        master: HOST:PORT of a TCP store that all processes reach, if the launcher gives one; else
            "".
        launcher_serves_store: whether the launcher itself serves that store; otherwise, rank 0 does
            so.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int | None = None
    launch_id: str = ""
    master: str = ""
    launcher_serves_store: bool = False

    @property
    def one_machine(self) -> bool:
        """Whether all processes were started on this machine."""
        return self.world_size == self.local_world_size


def read_numbers(
    variables: Mapping[str, str], launcher: str, command: str, names: tuple[str, str, str, str]
) -> LaunchedProcess:
    """Return the four numbers of a process.

    Args:
        variables: the environment.
        launcher: the launcher's name in `LAUNCHERS`.
        command: its command, for messages.
        names: its variables of rank, world size, local rank and local world size.

    Raises:
        ConfigError: one is missing, isn't a number, or contradicts another; names them.
    """
    require(variables, names, command)
    rank, size, local_rank, local_size = (read_integer(variables, name) for name in names)
    for index, count in (names[:2], names[2:]):
        if read_integer(variables, index) >= read_integer(variables, count):
            raise ConfigError(
                f"{index} {variables[index]} and {count} {variables[count]}: {index} must be less "
                f"than {count}; check where these variables are set."
            )
    if local_rank > rank or local_size > size:
        settings = ", ".join(f"{name} {variables[name]}" for name in names)
        raise ConfigError(
            f"{settings}: a machine can't have more processes than the world; check where these "
            "variables are set."
        )
    return LaunchedProcess(
        launcher=launcher,
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_world_size=local_size,
    )


def require(variables: Mapping[str, str], names: tuple[str, ...], command: str) -> None:
    """Require all of a launcher's variables.

    Raises:
        ConfigError: some are missing; names them.
    """
    missing = [name for name in names if name not in variables]
    if missing:
        present = [name for name in names if name in variables]
        verb = ("are" if len(present) > 1 else "is", "aren't" if len(missing) > 1 else "isn't")
        raise ConfigError(
            f"{' and '.join(present)} {verb[0]} set and {', '.join(missing)} {verb[1]}: start all "
            f"processes with {command}, which sets all of these variables, or unset "
            f"{' and '.join(present)}."
        )


def read_integer(variables: Mapping[str, str], name: str) -> int:
    """Return a variable's value as a number from 0 on.

    Raises:
        ConfigError: it is something else.
    """
    text = variables[name]
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"{name} is {text!r} in the environment: it must be a whole number.")
    return int(text)


def read_port(variables: Mapping[str, str], name: str) -> int:
    """Return a variable's value as the number of a port.

    Raises:
        ConfigError: it is something else.
    """
    port = read_integer(variables, name)
    if not 0 < port < 65536:
        raise ConfigError(f"{name} is {port} in the environment: a port must be 1 to 65535.")
    return port
