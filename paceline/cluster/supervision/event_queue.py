"""What a supervisor waits for, in one queue: workers' ends, signals, other machines' failures.

Threads and signal handlers put events in; the main thread alone takes them out and acts.

Ctrl-Z stops a supervisor with its workers, which have sessions of their own; `fg` or `bg`
continues them all:

    SIGTSTP ─▶ SIGSTOP to the workers' process groups ─▶ this process stops
    SIGCONT ─▶ this process continues ─▶ SIGCONT to the groups
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

from paceline.cluster.stores.failure_report import FailureReport


@dataclass(frozen=True, kw_only=True)
class Exited:
    """Event: a worker of this machine ended.

    Attributes:
        local_rank: the worker's.
        returncode: its exit status; negative: the number of the signal that killed it; None: it
            isn't known, because the worker outlived its wrapper.
    """

    local_rank: int
    returncode: int | None


Event = Exited | signal.Signals | FailureReport | str
"""A worker's end, a signal that asks the supervisor to end, another machine's reason for the run's
end, or a note for the user, which ends nothing. `EventQueue.get` returns no SIGTSTP."""


class Interrupted(Exception):
    """Exception that a pause raises when an event ends the pause."""

    def __init__(self, event: signal.Signals | FailureReport) -> None:
        super().__init__(event)
        self.event = event


class EventQueue:
    """Event queue that threads and signal handlers put events into.

    The reader waits in `select` on a socket, not on a lock. The kernel may deliver a signal to
    a thread other than the main thread; then only a byte written to the socket wakes the main
    thread.

    Attributes:
        signal: the last signal that was received; None: none was.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._events: deque[Event] = deque()
        self._groups: set[int] = set()
        self._groups_lock = threading.Lock()  # held while they get a signal, or one is removed
        self._wake_receiver, self._wake_sender = socket.socketpair()
        for end in (self._wake_receiver, self._wake_sender):
            end.setblocking(False)

    def put(self, event: Event) -> None:
        """Add an event."""
        # Before the wake: the reader looks into the queue once it is awake. Appending to a deque
        # takes no lock, which a signal's handler could find held.
        self._events.append(event)
        with suppress(OSError):  # full: the reader is awake already; closed: it is gone
            self._wake_sender.send(b"!")

    def get(self, timeout: float | None = None) -> Event | None:
        """Return the next event, or None if none comes within `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            if self._events:
                event = self._events.popleft()
                if event is not signal.SIGTSTP:
                    return event
                self._stop()
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            if not self._events and select.select([self._wake_receiver], [], [], left)[0]:
                self._wake_receiver.recv(1024)

    def add_group(self, number: int) -> None:
        """Let a process group stop and continue with this process, which Ctrl-Z stops."""
        self._groups.add(number)

    def remove_group(self, number: int) -> None:
        """Let a process group be, before its number may be used again."""
        with self._groups_lock:
            self._groups.discard(number)

    def _stop(self) -> None:
        """Stop the process groups and this process; return once it continues, and they do."""
        self._send(signal.SIGSTOP)
        # To this thread, so that the process has stopped when the call returns.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        with self._groups_lock:
            for group in self._groups:
                with suppress(ProcessLookupError):
                    os.killpg(group, number)

    def pause(self, seconds: float) -> None:
        """Sleep.

        Raises:
            Interrupted: a signal or a failure came.
        """
        event = self.get(seconds)
        if isinstance(event, signal.Signals | FailureReport):
            raise Interrupted(event)

    def close(self) -> None:
        """Release the socket; no event comes any more."""
        self._wake_receiver.close()
        self._wake_sender.close()

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Receive SIGINT, SIGTERM, SIGHUP, SIGQUIT and SIGTSTP inside the block; main thread only.

        SIGUSR1 and SIGUSR2, by which schedulers such as Slurm announce an end, have no effect.
        """

        def handle(number: int, frame: FrameType | None) -> None:
            if number != signal.SIGTSTP:
                self.signal = signal.Signals(number)
            self.put(signal.Signals(number))

        numbers = [signal.SIGINT, signal.SIGTERM]
        for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a shell, wants it so
                numbers.append(number)
        before = [(number, signal.signal(number, handle)) for number in numbers]
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            before.append((number, signal.signal(number, lambda *_: None)))
        # The system writes to this end at once, also while
        # Python is in a call that no handler interrupts.
        wakeup = signal.set_wakeup_fd(self._wake_sender.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before:
                signal.signal(number, handler)
