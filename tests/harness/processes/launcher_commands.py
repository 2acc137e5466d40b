"""Starts a script under each launcher, as a person would."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.harness.network.ports import free_port
from tests.harness.processes.command import Result, Running
from tests.harness.processes.python_program import BIN, ROOT

PATH = {"PYTHONPATH": str(ROOT)}
PREFIXES: Mapping[str, Sequence[str]] = {
    "python": (),
    "paceline": (f"{BIN}/paceline", "launch", "-n", "2", "--"),
    "torchrun": (f"{BIN}/torchrun", "--nproc-per-node", "2", "--no-python"),
    "mpirun": (f"{BIN}/mpirun", "-n", "2"),
}


class Script(Running):
    """A script that runs under a launcher."""

    def __init__(
        self, launcher: str, *words: str, folder: Path, real: bool = False, ranks: int = 2
    ) -> None:
        prefix = [str(ranks) if word == "2" else word for word in PREFIXES[launcher]]
        command = [*prefix, sys.executable, *words]
        if launcher == "torchrun":  # its default port may be somebody's
            command[1:1] = ["--master-port", str(free_port())]
        super().__init__(command, folder=folder, variables=PATH, real=real)


@contextmanager
def slurm_tasks(*words: str, folder: Path, real: bool = False) -> Iterator[list[Running]]:
    """Start two processes with the variables that srun gives them on one node."""
    port = free_port()
    tasks = [
        Running(
            [sys.executable, *words],
            folder=folder,
            real=real,
            variables={
                "SLURM_JOB_ID": "17",
                "SLURM_STEP_ID": "0",
                "SLURM_PROCID": str(rank),
                "SLURM_NTASKS": "2",
                "SLURM_LOCALID": str(rank),
                "SLURM_NODEID": "0",
                "SLURM_TASKS_PER_NODE": "2",
                "SLURM_NODELIST": "node1",
                "MASTER_PORT": str(port),
                **PATH,
            },
        )
        for rank in range(2)
    ]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.end()


def run(launcher: str, *words: str, folder: Path, real: bool = False, ranks: int = 2) -> Result:
    """Run a script to its end; under Slurm with two ranks."""
    if launcher != "slurm":
        return Script(launcher, *words, folder=folder, real=real, ranks=ranks).wait()
    with slurm_tasks(*words, folder=folder, real=real) as tasks:
        ended = [task.wait() for task in tasks]
        return Result(max(task.status for task in ended), "".join(task.text for task in ended))
