"""One worker as its supervisor holds it: a process in a session of its own.

In its own session it gets no Ctrl-C from the terminal; signals come from the supervisor alone.
Its output goes where the supervisor's goes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from paceline.cluster.environment import WorkerEnvironment, environment_of
from paceline.cluster.supervision.failure_report import FailureReport


class WorkerProcess:
    """A running worker.

    Args:
        argv: the command.
        environment: the worker's place in the run.
        ended: called with the exit status (negative: the signal that killed it), from a thread,
            once the worker and whatever it started are gone.

    Raises:
        OSError: the command can't be started.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environment: WorkerEnvironment,
        ended: Callable[[int], None],
    ) -> None:
        self._error_file = Path(environment.error_file)
        self._ended = ended
        self._lock = threading.Lock()  # over `_running`: a reaped process's number is somebody's
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
        """Send a signal to the worker and whatever it started."""
        with self._lock:
            if self._running:
                self._send(number)

    def failure(self, whom: str, returncode: int) -> FailureReport:
        """Return why the worker failed: its own word, or what its exit status says."""
        return self.word(whom) or FailureReport.of_exit(whom, returncode)

    def word(self, whom: str) -> FailureReport | None:
        """Return what the worker left on why it fails, perhaps before it has ended."""
        if not self._error_file.exists():
            return None
        return FailureReport.from_text(self._error_file.read_bytes()).by(whom)

    def _wait(self) -> None:
        # Not reaped yet, so that its number still names its process group.
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            self._send(signal.SIGKILL)
            self._running = False
            returncode = self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._ended(returncode)

    def _send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # all of the group are gone
            os.killpg(self._process.pid, number)
