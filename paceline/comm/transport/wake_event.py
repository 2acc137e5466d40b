"""What a thread sleeps on, and the loop that moves bytes wakes it by."""

from __future__ import annotations

import os
import select
from contextlib import suppress


class WakeEvent:
    """A thread's own, of the kernel.

    Attributes:
        number: its descriptor, to which a word is written to wake the thread.
    """

    def __init__(self) -> None:
        self.number = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self.number, select.POLLIN)

    def sleep(self, limit: float) -> bool:
        """Sleep; return False at the limit."""
        if limit <= 0 or not self._poll.poll(limit * 1000):
            return False
        self.clear()
        return True

    def clear(self) -> None:
        """Forget that it was written to."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.number)

    def __del__(self) -> None:
        os.close(self.number)
