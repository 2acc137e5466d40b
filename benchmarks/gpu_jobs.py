"""Processes of `gpu.py`: their output goes to files, all waits have a limit, and all are ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from gpu_rows import Setting

HERE = Path(__file__).parent
_PLACE = re.compile(r'File "[^"]*/(paceline/[^"]+)", line (\d+)')  # of a traceback
_ERROR = re.compile(r"paceline: |[\w.]*(Error|Exception)\b")  # of Paceline, and of Python
PACELINE = (sys.executable, "-m", "paceline.cli.main")


class JobFailed(Exception):
    """A process ended otherwise than it should, or too late."""


class Job:
    """A process with a name, whose output goes to a file.

    Args:
        name: names it in errors; its output's file has this name.
        command: its words.
        setting: its folder, and the deadline of all waits.
        variables: of its environment, besides this one's.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        setting: Setting,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._setting = setting
        self._output = setting.folder / f"{name}.txt"
        self._shown = False
        path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "PYTHONPATH": path, **(variables or {})},
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        """What it has printed."""
        return self._output.read_text(errors="replace")

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    def wait(self) -> int:
        """Wait for its end; return its exit status.

        Raises:
            JobFailed: it still runs at the deadline.
        """
        try:
            return self._process.wait(timeout=max(self._setting.left, 0))
        except subprocess.TimeoutExpired:
            raise self.failed("still runs at the section's limit") from None

    def require_success(self) -> None:
        """Wait for its end.

        Raises:
            JobFailed: its status isn't 0, or it still runs at the deadline.
        """
        status = self.wait()
        if status:
            raise self.failed(f"ended with status {status}")

    def failed(self, what: str) -> JobFailed:
        """Return an error with what it printed; the full output goes to stderr, once."""
        if not self._shown:
            print(f"--- {self.name} {what}; it printed:\n{self.text[-6000:]}", file=sys.stderr)
            self._shown = True
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        said = [line for line in lines if _ERROR.match(line)] or lines or ["nothing"]
        places = _PLACE.findall(self.text)
        at = f" at {':'.join(places[-1])}" if places else ""
        return JobFailed(f"{self.name} {what}{at}: {said[-1]}")

    def end(self) -> None:
        """Kill it, and all that it has started: workers have sessions of their own."""
        for pid in (self._process.pid, *_descendants(self._process.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


class Jobs(ExitStack):
    """Context in which jobs run; those that still run at its end are killed.

    Args:
        setting: of all jobs.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self._setting = setting

    def __enter__(self) -> Self:
        return self

    def start(
        self, name: str, command: Sequence[str], variables: Mapping[str, str] | None = None
    ) -> Job:
        """Start a job."""
        job = Job(name, command, self._setting, variables)
        self.callback(job.end)
        return job


def _descendants(ancestor: int) -> list[int]:
    """Return the processes that a process has started, and theirs."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):  # it has ended
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                children.setdefault(int(parent), []).append(int(entry.name))
    found = [ancestor]
    for pid in found:  # which grows
        found += children.get(pid, [])
    return found[1:]
