"""One worker, in its supervisor: a process in a session of its own.

In its own session it gets no Ctrl-C from the terminal; signals come from the supervisor alone.
Its output goes where the supervisor's goes.

The process may be a wrapper around the worker (`paceline launch`). A worker with a survival mark
outlives its wrapper: the supervisor then waits for the worker itself, by a descriptor of the
process (pidfd), which doesn't give its exit status.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from paceline.cluster.environment import WorkerEnvironment, environment_of
from paceline.cluster.stores.failure_report import FailureReport
from paceline.cluster.supervision.event_queue import EventQueue, Exited
from paceline.cluster.supervision.parent_death_watchdog import END
from paceline.cluster.supervision.survival_mark import read_mark
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
        self._survival_mark = environment.survival_mark
        self._local_rank = environment.local_rank
        self._events = events
        self._lock = threading.Lock()  # over `_running`: a reaped process's number is used again
        self._running = True
        self._process = subprocess.Popen(
            list(argv),
            bufsize=0,
            stdin=subprocess.PIPE,
            env=environment_of(environment),
            start_new_session=True,
        )
        events.add_group(self._process.pid)
        self._write(f"{self._survival_mark}\n".encode())
        name = f"worker {environment.local_rank}"
        self._thread = threading.Thread(target=self._wait, name=name, daemon=True)
        self._thread.start()

    @property
    def survives(self) -> bool:
        """Whether the worker has declared that its world survives the loss of a process."""
        return read_mark(self._survival_mark) is not None

    def announce_end(self) -> None:
        """Report to the worker and its wrapper that they end with their supervisor."""
        with self._lock:
            if self._running:
                self._write(END)

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
        outlived = self._await_survivor()
        # Before the process is reaped: its number may then be another group's.
        self._events.remove_group(self._process.pid)
        with self._lock:
            # What the worker has started, such as decode processes, ends with it.
            self._send(signal.SIGKILL)
            self._running = False
            returncode: int | None = self._process.wait()
            if outlived:
                mark = read_mark(self._survival_mark)
                returncode = 0 if mark is not None and mark.closed else None
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._events.put(Exited(local_rank=self._local_rank, returncode=returncode))

    def _await_survivor(self) -> bool:
        """Wait for the end of a worker that outlives its wrapper; return whether it did."""
        mark = read_mark(self._survival_mark)
        if mark is None or mark.pid == self._process.pid:
            return False
        try:
            process = os.pidfd_open(mark.pid)
        except OSError:  # it has ended
            return False
        try:
            if os.getsid(mark.pid) != self._process.pid:  # its number in another container
                return False
            poll = select.poll()
            poll.register(process, select.POLLIN)
            ended_before = bool(poll.poll(0))
            poll.poll()
        except ProcessLookupError:
            return False
        finally:
            os.close(process)
        return not ended_before

    def _write(self, words: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the worker has ended
            self._process.stdin.write(words)

    def _send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # all of the group are gone
            os.killpg(self._process.pid, number)
