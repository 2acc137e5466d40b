"""One worker, in its supervisor: a process in a session of its own.

In its own session it gets no Ctrl-C from the terminal; signals come from the supervisor alone.
Its output goes where the supervisor's goes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from paceline.cluster.environment import WorkerEnvironment, environment_of
from paceline.cluster.supervision.event_queue import EventQueue, Exited
from paceline.cluster.supervision.failure_report import FailureReport
from paceline.errors import CommError


class WorkerProcess:
    """Running worker process.

    Args:
        argv: the command.
        environment: the worker environment to pass to the process.
        events: receives an `Exited` event from another thread, when the worker and all processes
            that it started have ended.

    Raises:
        OSError: the command can't be started.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environment: WorkerEnvironment,
        events: EventQueue,
    ) -> None:
        self._error_file = Path(environment.error_file)
        self._local_rank, self._events = environment.local_rank, events
        self._lock = threading.Lock()  # over `_running`: a reaped process's number is used again
        self._running = True
        self._process = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            env=environment_of(environment),
            start_new_session=True,
        )
        name = f"worker {environment.local_rank}"
        self._thread = threading.Thread(target=self._wait, name=name, daemon=True)
        self._thread.start()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the worker and what it started."""
        with self._lock:
            if self._running:
                self._send(number)

    def report(self, name: str) -> FailureReport | None:
        """Return the worker's report on why it fails, perhaps before it has ended."""
        text = self._error_file.read_bytes()
        with suppress(CommError):  # half of a report: the worker writes it at this moment
            return FailureReport.from_text(text).by(name) if text else None
        return None

    def hangs(self) -> bool:
        """Return whether the worker is in a call of the kernel that no signal interrupts."""
        try:
            text = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:  # it has ended
            return False
        return text.rpartition(")")[2].split()[0] == "D"

    def _wait(self) -> None:
        # Not reaped yet, so that its number still names its process group.
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            self._send(signal.SIGKILL)
            self._running = False
            returncode = self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._events.put(Exited(local_rank=self._local_rank, returncode=returncode))

    def _send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # all of the group are gone
            os.killpg(self._process.pid, number)
