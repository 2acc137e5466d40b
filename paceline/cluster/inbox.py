"""What a supervisor waits for, in one queue: workers' ends, signals, other machines' failures.

Threads and signal handlers put events in; the main thread alone takes them out and acts.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import FrameType

from paceline.cluster.failure import Failure


@dataclass(frozen=True, kw_only=True)
class Exited:
    """A worker of this machine ended."""

    local_rank: int
    returncode: int


@dataclass(frozen=True, kw_only=True)
class Signalled:
    """The supervisor got a signal that asks it to end."""

    number: signal.Signals


@dataclass(frozen=True, kw_only=True)
class Noticed:
    """Another machine gave the reason for the run's end."""

    failure: Failure


@dataclass(frozen=True, kw_only=True)
class Warned:
    """Something that the person should know, and that ends nothing."""

    text: str


Event = Exited | Signalled | Noticed | Warned


class Interrupted(Exception):
    """An event ended a pause."""

    def __init__(self, event: Signalled | Noticed) -> None:
        super().__init__(event)
        self.event = event


class Inbox:
    """A queue that threads and signal handlers put events into."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Event] = SimpleQueue()  # its `put` may interrupt its `put`

    def put(self, event: Event) -> None:
        """Add an event."""
        self._queue.put(event)

    def get(self, timeout: float | None = None) -> Event | None:
        """Return the next event, or None if none comes within `timeout` seconds."""
        try:
            return self._queue.get(timeout=timeout)
        except Empty:
            return None

    def pause(self, seconds: float) -> None:
        """Sleep.

        Raises:
            Interrupted: a signal or a failure came.
        """
        event = self.get(seconds)
        if isinstance(event, (Signalled, Noticed)):
            raise Interrupted(event)


@contextmanager
def signals_into(inbox: Inbox) -> Iterator[None]:
    """Put SIGINT, SIGTERM and SIGHUP into the inbox inside the block; main thread only."""

    def handle(number: int, frame: FrameType | None) -> None:
        inbox.put(Signalled(number=signal.Signals(number)))

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup wants it to stay so
        numbers.append(signal.SIGHUP)
    before = [(number, signal.signal(number, handle)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
