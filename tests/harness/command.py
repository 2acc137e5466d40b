"""Runs the real commands as a person would: in a folder, as processes, with signals."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

LIMIT = 90.0


@dataclass(frozen=True)
class Ended:
    """How a command ended, and all that it printed."""

    status: int
    text: str


class Command:
    """A `paceline` command that runs; `wait` for it."""

    def __init__(
        self, *words: str, folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "paceline.cli.main", *words],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        )

    def wait(self, limit: float = LIMIT) -> Ended:
        """Wait for the end; a command over the limit is killed with its workers, and fails."""
        try:
            text, _ = self._process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            self.send(9)
            text, _ = self._process.communicate()
            raise AssertionError(f"still running after {limit} s:\n{text}") from None
        return Ended(self._process.returncode, text)

    @property
    def pid(self) -> int:
        """The command's process, not those that it started."""
        return self._process.pid

    def send(self, number: int) -> None:
        """Send a signal to the command itself, not to what it started."""
        self._process.send_signal(number)

    def family(self) -> list[psutil.Process]:
        """The processes that it started, theirs included."""
        return psutil.Process(self._process.pid).children(recursive=True)

    def line_with(self, words: str) -> str:
        """Read until a line with `words` comes; return it."""
        assert self._process.stdout is not None
        seen = []
        for line in self._process.stdout:
            if words in line:
                return line
            seen.append(line)
        raise AssertionError(f"ended without {words!r}:\n{''.join(seen)}")


def run(*words: str, folder: Path, limit: float = LIMIT) -> Ended:
    """Run a command to its end."""
    return Command(*words, folder=folder).wait(limit)


def rows_of(run_folder: Path) -> list[dict[str, str]]:
    """Read the CSV log, the one in the run's folder."""
    (log,) = run_folder.glob("*.log")
    return list(csv.DictReader(log.read_text().splitlines()[1:]))


def gone(processes: Sequence[psutil.Process], limit: float = 5.0) -> bool:
    """Tell whether all processes end within the limit.

    One that nobody waited for has ended too: a container's first process may not do that for
    orphans.
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
