"""Starts processes as launchers do: real torchrun and mpirun, and srun's variables by hand."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil

from paceline.cluster.environment import read_environment
from tests.harness.network.ports import free_port
from tests.harness.processes import launched_program as joiner
from tests.harness.processes.fork_server import ServedPopen

LIMIT = 100.0
BIN = Path(sys.executable).parent
JOINER = ("-m", "tests.harness.processes.launched_program")
ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, kw_only=True)
class End:
    """How one process ended, and all that it printed."""

    status: int
    text: str


class Program:
    """A program that runs; what it prints goes to a file."""

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

    def wait(self, limit: float = LIMIT) -> End:
        """Wait for the end; a program over the limit is killed with its children, and fails."""
        try:
            status = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {limit} s:\n{self.text}") from None
        return End(status=status, text=self.text)

    def printed(self, words: str) -> None:
        """Wait until the program has printed something."""
        while words not in self.text:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.05)
                raise AssertionError(f"ended without {words!r}:\n{self.text}")

    def kill(self) -> None:
        """Kill the program and what it started."""
        with suppress(psutil.NoSuchProcess):  # it ended by itself, and its server knows already
            top = psutil.Process(self.process.pid)
            for process in [*top.children(recursive=True), top]:
                process.kill()
        self.process.wait()

    @property
    def text(self) -> str:
        """What it has printed until now."""
        return self._log.read_text()


class Task:
    """A joiner, up at once because torch is there already."""

    def __init__(self, variables: Mapping[str, str], words: Sequence[str], folder: Path) -> None:
        self._log = fresh_log(folder)
        self._log.touch()
        place = (dict(variables), list(words), str(folder), str(self._log))
        self.process = get_context("forkserver").Process(target=_join, args=place)
        self.process.start()

    def wait(self, limit: float = LIMIT) -> End:
        """Wait for the end."""
        self.process.join(limit)
        assert self.process.exitcode is not None, f"still running:\n{self.text}"
        return End(status=self.process.exitcode, text=self.text)

    def printed(self, words: str) -> None:
        """Wait until the task has printed something."""
        while words not in self.text:
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
def torchrun(processes: int, argv: Sequence[str], folder: Path, *options: str) -> Iterator[Program]:
    """Run `python argv` as so many processes of torchrun; they end with the block."""
    command = [str(BIN / "torchrun"), "--nproc-per-node", str(processes), *options, *argv]
    with _ended(Program(command, folder, {})) as programs:
        yield programs[0]


@contextmanager
def mpirun(processes: int, argv: Sequence[str], folder: Path, *options: str) -> Iterator[Program]:
    """Run `python argv` as so many processes of mpirun; they end with the block."""
    command = [str(BIN / "mpirun"), "-n", str(processes), *options, sys.executable, *argv]
    with _ended(Program(command, folder, {})) as programs:
        yield programs[0]


@contextmanager
def srun(
    argv: Sequence[str],
    folder: Path,
    nodes: Sequence[int] = (2,),
    *,
    each: Mapping[int, Sequence[str]] | None = None,
) -> Iterator[list[Program]]:
    """Run `python argv` once a task, with the variables that srun sets.

    Args:
        argv: the program and its arguments.
        folder: where.
        nodes: the tasks of each.
        each: more arguments for the tasks of these numbers.
    """
    variables = [{**own, **rendezvous} for rendezvous in [place()] for own in srun_variables(nodes)]
    with by_variables(argv, [folder] * len(variables), variables, each=each) as programs:
        yield programs


@contextmanager
def by_variables(
    argv: Sequence[str],
    folders: Sequence[Path],
    variables: Sequence[Mapping[str, str]],
    *,
    each: Mapping[int, Sequence[str]] | None = None,
) -> Iterator[list[Program]]:
    """Run `python argv` with each set of variables; the programs end with the block."""
    words = each or {}
    programs = [
        Program([sys.executable, *argv, *words.get(number, ())], folder, own)
        for number, (folder, own) in enumerate(zip(folders, variables, strict=True))
    ]
    with _ended(*programs):
        yield programs


@contextmanager
def joiners(
    variables: Sequence[Mapping[str, str]], folder: Path, *words: str, meet: bool = True
) -> Iterator[list[Task]]:
    """Run a joiner with each set of variables; they end with the block.

    Args:
        variables: what a launcher tells each process.
        folder: where.
        words: what the joiners are told.
        meet: name a free port for them to meet at.
    """
    rendezvous = place() if meet else {}
    tasks = [Task({**own, **rendezvous}, words, folder) for own in variables]
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


def place() -> dict[str, str]:
    """Return the variables that name a rendezvous on this machine."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def check_world(folder: Path, launcher: str, machines: list[int]) -> None:
    """Require that all joiners were in one world of these machines."""
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
    """Take what the joiners wrote down, by rank."""
    files = sorted(folder.glob("facts.*.json"))
    found = [json.loads(file.read_text()) for file in files]
    for file in files:
        file.unlink()
    return found


def fresh_log(folder: Path) -> Path:
    """Return the path of a log that isn't there yet."""
    return next(path for i in count() if not (path := folder / f"printed.{i}").exists())


@contextmanager
def _ended(*programs: Program) -> Iterator[Sequence[Program]]:
    try:
        yield programs
    finally:
        for program in programs:
            if program.process.poll() is None:
                program.kill()


def _join(variables: dict[str, str], words: list[str], folder: str, log: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    limit, *order = words
    sys.exit(joiner.main(read_environment(variables), float(limit), *order))
