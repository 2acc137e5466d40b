"""Starts a script under each launcher, as a person would."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.harness.command import LIMIT, Ended
from tests.harness.ports import free_port

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
PREFIXES: Mapping[str, Sequence[str]] = {
    "python": (),
    "paceline": (f"{BIN}/paceline", "launch", "-n", "2", "--"),
    "torchrun": (f"{BIN}/torchrun", "--nproc-per-node", "2", "--no-python"),
    "mpirun": (f"{BIN}/mpirun", "-n", "2"),
}


class Script:
    """A script that runs; `wait` for it."""

    def __init__(self, launcher: str, *words: str, folder: Path) -> None:
        command = [*PREFIXES[launcher], sys.executable, *words]
        if launcher == "torchrun":  # its default port may be somebody's
            command[1:1] = ["--master-port", str(free_port())]
        self._process = _start(command, folder, {})

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, number: int) -> None:
        """Send a signal to the command, not to what it started."""
        self._process.send_signal(number)

    def kill_all(self) -> None:
        """Kill the command and all that it started, at once."""
        parent = psutil.Process(self._process.pid)
        for process in [parent, *parent.children(recursive=True)]:
            process.kill()

    def line_with(self, words: str) -> str:
        """Read until a line with `words` comes; return it."""
        assert self._process.stdout is not None
        seen = []
        for line in self._process.stdout:
            if words in line:
                return line
            seen.append(line)
        raise AssertionError(f"ended without {words!r}:\n{''.join(seen)}")

    def wait(self, limit: float = LIMIT) -> Ended:
        """Wait for the end; a script over the limit is killed, and fails."""
        try:
            text, _ = self._process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            self.kill_all()
            text, _ = self._process.communicate()
            raise AssertionError(f"still running after {limit} s:\n{text}") from None
        return Ended(self._process.returncode, text)


@contextmanager
def slurm_tasks(*words: str, folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Start two processes with the variables that srun gives them on one node."""
    port = free_port()
    tasks = [
        _start(
            [sys.executable, *words],
            folder,
            {
                "SLURM_JOB_ID": "17",
                "SLURM_STEP_ID": "0",
                "SLURM_PROCID": str(rank),
                "SLURM_NTASKS": "2",
                "SLURM_LOCALID": str(rank),
                "SLURM_NODEID": "0",
                "SLURM_TASKS_PER_NODE": "2",
                "SLURM_NODELIST": "node1",
                "MASTER_PORT": str(port),
            },
        )
        for rank in range(2)
    ]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.kill()
            task.wait()


def run(launcher: str, *words: str, folder: Path) -> Ended:
    """Run a script to its end."""
    if launcher != "slurm":
        return Script(launcher, *words, folder=folder).wait()
    with slurm_tasks(*words, folder=folder) as tasks:
        texts = [task.communicate(timeout=LIMIT)[0] for task in tasks]
        return Ended(max(task.returncode for task in tasks), "".join(texts))


def _start(
    command: Sequence[str], folder: Path, variables: Mapping[str, str]
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        list(command),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables},
    )
