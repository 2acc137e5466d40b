"""Starts processes as launchers do: real torchrun and mpirun, and srun's variables by hand."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil

from paceline.cluster.environment import read_environment
from tests.harness.network.ports import free_port
from tests.harness.processes import launched_program
from tests.harness.processes.command import Result, kill
from tests.harness.processes.fork_server import ServedPopen
from tests.harness.processes.python_program import BIN, ROOT

LIMIT = 100.0
LAUNCHED_PROGRAM = ("-m", "tests.harness.processes.launched_program")


class LoggedProcess:
    """Process of a program, whose output goes to a file."""

    def __init__(self, argv: Sequence[str], folder: Path, variables: Mapping[str, str]) -> None:
        self._log = fresh_log(folder)
        own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
        with self._log.open("w") as output:
            self.process = ServedPopen(
                list(argv),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **own},
            )

    def wait(self, limit: float = LIMIT) -> Result:
        """Wait for the end; a program over the limit is killed with its children, and fails."""
        try:
            status = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {limit} s:\n{self.text}") from None
        return Result(status=status, text=self.text)

    def wait_for_output(self, expected: str) -> None:
        """Wait until the program has printed something."""
        while expected not in self.text:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.05)
                assert expected in self.text, f"ended without {expected!r}:\n{self.text}"

    def kill(self) -> None:
        """Kill the program and what it started."""
        with suppress(psutil.NoSuchProcess):  # it ended by itself, and its server knows already
            top = psutil.Process(self.process.pid)
            kill(*top.children(recursive=True), top)
        self.process.wait()

    @property
    def text(self) -> str:
        """What it has printed until now."""
        return self._log.read_text()


class Task:
    """Process of `launched_program`, which starts at once because torch is imported already."""

    def __init__(
        self, variables: Mapping[str, str], arguments: Sequence[str], folder: Path
    ) -> None:
        self._log = fresh_log(folder)
        self._log.touch()
        of_join = (dict(variables), list(arguments), str(folder), str(self._log))
        self.process = get_context("forkserver").Process(target=_join, args=of_join)
        self.process.start()

    def wait(self, limit: float = LIMIT) -> Result:
        """Wait for the end."""
        self.process.join(limit)
        assert self.process.exitcode is not None, f"still running:\n{self.text}"
        return Result(status=self.process.exitcode, text=self.text)

    def wait_for_output(self, expected: str) -> None:
        """Wait until the task has printed something."""
        while expected not in self.text:
            self.process.join(0.02)
            assert self.process.exitcode is None, self.text

    def send(self, number: signal.Signals) -> None:
        """Send the task a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    @property
    def text(self) -> str:
        """What it has printed until now."""
        return self._log.read_text()


@contextmanager
def torchrun(
    processes: int, argv: Sequence[str], folder: Path, *options: str
) -> Iterator[LoggedProcess]:
    """Run `python argv` as so many processes of torchrun; they end with the block."""
    command = [str(BIN / "torchrun"), "--nproc-per-node", str(processes), *options, *argv]
    with _ended(LoggedProcess(command, folder, {})) as programs:
        yield programs[0]


@contextmanager
def mpirun(
    processes: int, argv: Sequence[str], folder: Path, *options: str
) -> Iterator[LoggedProcess]:
    """Run `python argv` as so many processes of mpirun; they end with the block."""
    command = [str(BIN / "mpirun"), "-n", str(processes), *options, sys.executable, *argv]
    with _ended(LoggedProcess(command, folder, {})) as programs:
        yield programs[0]


@contextmanager
def srun(
    argv: Sequence[str],
    folder: Path,
    nodes: Sequence[int] = (2,),
    *,
    each: Mapping[int, Sequence[str]] | None = None,
) -> Iterator[list[LoggedProcess]]:
    """Run `python argv` once a task, with the variables that srun sets.

    Args:
        argv: the program and its arguments.
        folder: where.
        nodes: the tasks of each.
        each: more arguments for the tasks of these numbers.
    """
    variables = [
        {**own, **rendezvous}
        for rendezvous in [rendezvous_variables()]
        for own in srun_variables(nodes)
    ]
    with by_variables(argv, [folder] * len(variables), variables, each=each) as programs:
        yield programs


@contextmanager
def by_variables(
    argv: Sequence[str],
    folders: Sequence[Path],
    variables: Sequence[Mapping[str, str]],
    *,
    each: Mapping[int, Sequence[str]] | None = None,
) -> Iterator[list[LoggedProcess]]:
    """Run `python argv` with each set of variables; the programs end with the block."""
    more = each or {}
    programs = [
        LoggedProcess([sys.executable, *argv, *more.get(number, ())], folder, own)
        for number, (folder, own) in enumerate(zip(folders, variables, strict=True))
    ]
    with _ended(*programs):
        yield programs


@contextmanager
def launched_programs(
    variables: Sequence[Mapping[str, str]], folder: Path, *arguments: str, meet: bool = True
) -> Iterator[list[Task]]:
    """Run `launched_program` with each set of variables; the processes end with the block.

    Args:
        variables: those that a launcher sets for each process.
        folder: where.
        arguments: those of the program: a timeout, and an order.
        meet: set the variables of a rendezvous, too.
    """
    rendezvous = rendezvous_variables() if meet else {}
    tasks = [Task({**own, **rendezvous}, arguments, folder) for own in variables]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.process.kill()
            task.process.join()


def srun_variables(nodes: Sequence[int], job: str = "4711") -> list[dict[str, str]]:
    """Return the variables of each task, as srun sets them, on nodes n0, n1 and so on."""
    counts, world = ",".join(map(str, nodes)), str(sum(nodes))
    names = f"n[0-{len(nodes) - 1}]" if len(nodes) > 1 else "n0"
    places = [(node, local) for node, size in enumerate(nodes) for local in range(size)]
    return [
        {
            "SLURM_JOB_ID": job,
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(local),
            "SLURM_NODEID": str(node),
            "SLURM_NTASKS": world,
            "SLURM_STEP_NUM_TASKS": world,
            "SLURM_NNODES": str(len(nodes)),
            "SLURM_TASKS_PER_NODE": counts,
            "SLURM_STEP_TASKS_PER_NODE": counts,
            "SLURM_NODELIST": names,
            "SLURM_STEP_NODELIST": names,
            "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
        }
        for rank, (node, local) in enumerate(places)
    ]


def rendezvous_variables() -> dict[str, str]:
    """Return the variables that name a rendezvous on this machine."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def check_world(folder: Path, launcher: str, machines: list[int]) -> None:
    """Require that all processes were in one world of these machines."""
    found = facts(folder)
    world = sum(machines)
    assert [f["rank"] for f in found] == list(range(world))
    assert {f["launcher"] for f in found} == {launcher}
    assert all(f["machines"] == machines for f in found)
    assert [f["machine"] for f in found] == [m for m, n in enumerate(machines) for _ in range(n)]
    assert {address for f in found for address in f["addresses"]} == {"127.0.0.1"}
    assert {f["told"] for f in found} == {"hello from rank 0"}
    assert {f["sum"] for f in found} == {sum(range(world))}
    assert len({f["token"] for f in found}) == 1


def facts(folder: Path) -> list[dict[str, Any]]:
    """Read and remove the facts that the processes wrote, by rank."""
    files = sorted(folder.glob("facts.*.json"))
    found = [json.loads(file.read_text()) for file in files]
    for file in files:
        file.unlink()
    return found


def fresh_log(folder: Path) -> Path:
    """Return the path of a log that isn't there yet."""
    return next(path for i in count() if not (path := folder / f"printed.{i}").exists())


@contextmanager
def _ended(*programs: LoggedProcess) -> Iterator[Sequence[LoggedProcess]]:
    try:
        yield programs
    finally:
        for program in programs:
            if program.process.poll() is None:
                program.kill()


def _join(variables: dict[str, str], arguments: list[str], folder: str, log: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    limit, *order = arguments
    sys.exit(launched_program.main(read_environment(variables), float(limit), *order))
