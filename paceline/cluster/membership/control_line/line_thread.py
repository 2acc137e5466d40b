"""Event loop of the control line: one thread with its sockets, posted calls and timers."""

from __future__ import annotations

import heapq
import itertools
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE
_CLOSE_S = 5.0


class Timer:
    """Timer: a call that is due at a moment, unless it is cancelled."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function

    def cancel(self) -> None:
        """Drop the call, if it has not been made."""
        self._function = None

    def fire(self) -> None:
        """Make the call, unless it is cancelled; on the line's thread."""
        function = self._function
        self._function = None
        if function is not None:
            function()


class LineThreadOwner(Protocol):
    """Protocol of what learns that a line's thread ends."""

    def thread_ended(self) -> None:
        """Release what the thread used: the last call on it, also after an exception."""


class LineThread:
    """Event loop with a thread of its own; an exception of a callback ends it.

    Args:
        owner: learns that the thread ends.
    """

    def __init__(self, owner: LineThreadOwner) -> None:
        self._owner = owner
        self._selector = selectors.DefaultSelector()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._event, READ, self._clear_event)
        self._lock = threading.Lock()  # guards all that follows
        self._calls: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()  # orders timers of one moment
        self._woken = self._ended = self._stopping = False
        self._thread = threading.Thread(target=self._run, name="control line", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def watch(self, file: socket.socket | int, events: int, call: Callable[[int], None]) -> None:
        """Call `call(events)` whenever a file is ready; on the line's thread, or before `start`."""
        try:
            self._selector.modify(file, events, call)
        except KeyError:
            self._selector.register(file, events, call)

    def unwatch(self, file: socket.socket | int) -> None:
        """Watch a file no longer; on the line's thread."""
        with suppress(KeyError):
            self._selector.unregister(file)

    def post(self, function: Callable[[], None]) -> None:
        """Run a function on the line's thread; not after the thread's end."""
        with self._lock:
            self._calls.append(function)
            self._wake()

    def call_later(self, seconds: float, function: Callable[[], None]) -> Timer:
        """Run a function on the line's thread after some seconds; return its timer."""
        timer = Timer(function)
        with self._lock:
            entry = (time.monotonic() + seconds, next(self._numbers), timer)
            heapq.heappush(self._timers, entry)
            # The thread sleeps until the first timer is due; a later one needs no wake.
            if self._timers[0] is entry:
                self._wake()
        return timer

    def is_current(self) -> bool:
        """Return whether the caller runs on the line's thread."""
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        """End the thread after its present turn."""
        with self._lock:
            self._stopping = True
            self._wake()

    def join(self) -> bool:
        """Wait for the thread's end; return False if a callback does not return in time."""
        if not self.is_current():
            self._thread.join(_CLOSE_S)
        return not self._thread.is_alive()

    def close_in_child(self) -> None:
        """Close this forked child's descriptors, and leave the parent's event loop as it is."""
        if not self._ended:
            self._ended = True
            os.close(self._event)
            self._selector.close()

    def _wake(self) -> None:
        """End the thread's wait; under the lock."""
        if not (self._woken or self._ended or self.is_current()):
            # One write wakes the thread for all calls that are posted until it clears the event.
            os.eventfd_write(self._event, 1)
            self._woken = True

    def _clear_event(self, _: int) -> None:
        with self._lock:
            self._woken = False
            os.eventfd_read(self._event)

    def _run(self) -> None:
        try:
            while not self._stopping:
                for key, events in self._selector.select(self._pause()):
                    # Otherwise a call before has changed or closed the file.
                    if self._selector.get_map().get(key.fd) is key:
                        key.data(events)
                self._make_calls()
        finally:
            self._owner.thread_ended()
            with self._lock:
                self._ended = True
                os.close(self._event)
                self._selector.close()

    def _pause(self) -> float | None:
        """Return for how many seconds the thread may wait; None for no limit."""
        with self._lock:
            if self._calls or self._stopping:
                return 0
            if not self._timers:
                return None
            return max(0.0, self._timers[0][0] - time.monotonic())

    def _make_calls(self) -> None:
        """Make the posted calls and those whose time has come; what they add waits a turn."""
        due: list[Callable[[], None]] = []
        with self._lock:
            due.extend(self._calls)
            self._calls.clear()
            now = time.monotonic()
            while self._timers and self._timers[0][0] <= now:
                due.append(heapq.heappop(self._timers)[2].fire)
        # Without the lock, because a call may post others.
        for call in due:
            call()
