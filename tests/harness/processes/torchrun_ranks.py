"""Ranks of a `paceline` command on any machines, with the variables that torchrun sets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.harness.processes.command import Result
from tests.harness.processes.launcher_processes import by_variables, rendezvous_variables

LIMIT = 300.0  # the first ranks of a fresh clone compile the kernels


def run_ranks(arguments: Sequence[str], machines: Sequence[int], folder: Path) -> Result:
    """Run a command as the ranks of one world, until all have ended.

    Args:
        arguments: of `paceline`.
        machines: the number of ranks of each machine.
        folder: the ranks' current folder.

    Returns:
        the largest status, and the output of all ranks.
    """
    variables = torchrun_variables(machines)
    argv = ["-m", "paceline.cli.main", *arguments]
    with by_variables(argv, [folder] * len(variables), variables) as programs:
        ends = [program.wait(LIMIT) for program in programs]
    return Result(max(abs(end.status) for end in ends), "".join(end.text for end in ends))


def torchrun_variables(machines: Sequence[int]) -> list[dict[str, str]]:
    """Return the variables that torchrun sets for each rank of a world.

    Args:
        machines: the number of ranks of each machine.
    """
    ranks = [(number, local) for number, size in enumerate(machines) for local in range(size)]
    rendezvous = rendezvous_variables()
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(ranks)),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(machines[machine]),
            "GROUP_RANK": str(machine),
            **rendezvous,
        }
        for rank, (machine, local) in enumerate(ranks)
    ]
