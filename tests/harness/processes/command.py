"""Runs `paceline` commands as processes: in a folder, with signals and exit statuses."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.harness.processes.fork_server import RealPopen, ServedPopen

LIMIT = 90.0


@dataclass(frozen=True)
class Result:
    """Result of a process that has ended: its exit status, and all that it printed."""

    status: int
    text: str


def kill(*processes: psutil.Process) -> None:
    """Kill processes, of which some may have ended, as workers do when their supervisor has."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


class Running:
    """A process that runs, and what it started; `wait` for it.

    Args:
        command: its words.
        folder: where.
        variables: of its environment, besides this one's.
        real: start a new interpreter for a Python program, instead of a fork of the fork server.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        folder: Path,
        variables: Mapping[str, str],
        real: bool = False,
    ) -> None:
        self._process = (RealPopen if real else ServedPopen)(
            list(command),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,  # `wait` reads the pipe itself, and would miss what a buffer has read ahead
            env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        )

    @property
    def pid(self) -> int:
        """The process itself, not those that it started."""
        return self._process.pid

    def send(self, number: int) -> None:
        """Send a signal to the process itself, not to what it started."""
        self._process.send_signal(number)

    def family(self) -> list[psutil.Process]:
        """The processes that it started, theirs included."""
        return psutil.Process(self._process.pid).children(recursive=True)

    def kill_all(self) -> None:
        """Kill the process and all that it started, at once."""
        with suppress(psutil.NoSuchProcess):  # it has ended, and something holds its output open
            kill(psutil.Process(self._process.pid), *self.family())

    def line_with(self, words: str) -> str:
        """Read up to a line that contains `words`; return that line."""
        return self.lines_with(words)[0]

    def lines_with(self, *words: str) -> list[str]:
        """Read until each of several words was in a line, in any order; return these lines.

        Lines of two processes come in any order: reading up to one may pass the other. Over the
        limit all processes are killed.
        """
        assert self._process.stdout is not None
        found: dict[str, str] = {}
        seen = []
        over = threading.Timer(LIMIT, self.kill_all)
        over.start()
        try:
            for line in map(_text, self._process.stdout):
                seen.append(line)
                found = {each: line for each in words if each in line} | found
                if len(found) == len(words):
                    return [found[each] for each in words]
        finally:
            over.cancel()
            over.join()
        missing = [each for each in words if each not in found]
        raise AssertionError(f"ended, or {LIMIT} s, without {missing}:\n{''.join(seen)}")

    def wait(self, limit: float = LIMIT) -> Result:
        """Wait for the end, and read what `line_with` left; over the limit all are killed."""
        try:
            text, _ = self._process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            self.kill_all()
            try:
                text, _ = self._process.communicate(timeout=10.0)
            except subprocess.TimeoutExpired as held:  # by a process that outlived its parent
                text = held.output or b""
            raise AssertionError(f"still running after {limit} s:\n{_text(text)}") from None
        return Result(self._process.returncode, _text(text))

    def end(self) -> None:
        """Kill the process, where it still runs, and close its output."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def _text(read: bytes) -> str:
    return read.decode().replace("\r\n", "\n").replace("\r", "\n")


class Command(Running):
    """A `paceline` command that runs."""

    def __init__(
        self,
        *words: str,
        folder: Path,
        environment: Mapping[str, str] | None = None,
        real: bool = False,
    ) -> None:
        command = [sys.executable, "-m", "paceline.cli.main", *words]
        super().__init__(command, folder=folder, variables=environment or {}, real=real)


def run(*words: str, folder: Path, limit: float = LIMIT, real: bool = False) -> Result:
    """Run a command to its end."""
    return Command(*words, folder=folder, real=real).wait(limit)


def rows_of(run_folder: Path) -> list[dict[str, str]]:
    """Read the CSV log, the one in the run's folder."""
    (log,) = run_folder.glob("*.log")
    return list(csv.DictReader(log.read_text().splitlines()[1:]))


def loss_of(name: str) -> str:
    """Return a pattern of the reasons by which members suspect a killed one.

    A supervisor that doesn't run for 0.2 s reports the exit after the connections' ends.

    Args:
        name: pattern of the name that messages give it.
    """
    return rf"(?:{name} was killed by SIGKILL|the connections of {name} ended \d+\.\d s ago)"


def all_end(processes: Sequence[psutil.Process], limit: float = 5.0) -> bool:
    """Return whether all processes end within the limit.

    A zombie has ended too: the first process of a container may not wait for orphans.
    """
    end = time.monotonic() + limit
    while not all(_ended(process) for process in processes):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def _ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
