"""Waiting for other machines: a limit, a line that says for whom, and a pause that can be ended."""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.errors import CommError

_PAUSE_S = 0.1


class DeadlinePassed(CommError):
    """Somebody didn't come within the limit."""


class Deadline:
    """One limit over all waits of a start.

    Args:
        limit: seconds from now.
        tell: receives a line when what is waited for changes.
        pause: sleeps for some seconds, or raises what ends the wait (a signal, a failure).
        remedy: what the caller can do, the end of the error's sentence.
    """

    def __init__(
        self,
        limit: float,
        tell: Callable[[str], None],
        pause: Callable[[float], None],
        remedy: str,
    ) -> None:
        self._limit = limit
        self._deadline = time.monotonic() + limit
        self._tell = tell
        self._pause = pause
        self._remedy = remedy
        self._told = ""

    def wait(self, whom: str) -> None:
        """Pause for a moment, having told whom the wait is for, if that is new.

        Raises:
            DeadlinePassed: the limit is over.
        """
        if time.monotonic() > self._deadline:
            raise DeadlinePassed(f"{whom} didn't come within {self._limit:g} s: {self._remedy}.")
        if whom != self._told:
            self._tell(f"waiting for {whom}")
            self._told = whom
        self.pause()

    def pause(self) -> None:
        """Pause for a moment of a wait that has a limit of its own and isn't worth a line."""
        self._pause(_PAUSE_S)

    def at_most(self, limit: float, remedy: str) -> Deadline:
        """Return a patience that ends sooner, if `limit` is sooner."""
        left = max(0.0, self._deadline - time.monotonic())
        return Deadline(min(limit, left), self._tell, self._pause, remedy)


def name_machines(missing: list[int], machines: int) -> str:
    """Name machines by their numbers: "machines 1, 2 of 4"."""
    plural = "s" if len(missing) > 1 else ""
    return f"machine{plural} {', '.join(map(str, missing))} of {machines}"
