"""Waiting for other machines: a limit, a line that names what is waited for, and a pause."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch._C._distributed_c10d import Store

from paceline.errors import CommError, Message

_PAUSE_S = 0.1


class DeadlinePassed(CommError):
    """Error of a start in which an awaited event didn't happen before the deadline."""


class Deadline:
    """Deadline shared by all waits of one start.

    Args:
        limit: seconds from now to the deadline.
        report: called with a line that names the awaited event, whenever that event changes.
        pause: sleeps for the given number of seconds; raises if an event such as a signal or a
            failure must end the wait.
        remedy: what the user can do, as the end of the error's sentence.
        quiet: seconds from now in which nothing is reported.
    """

    def __init__(
        self,
        limit: float,
        report: Callable[[str], None],
        pause: Callable[[float], None],
        remedy: str | Message,
        quiet: float = 0.0,
    ) -> None:
        self._loud = time.monotonic() + quiet
        self._limit = limit
        self._deadline = time.monotonic() + limit
        self._report = report
        self._pause = pause
        self._remedy = remedy
        self._reported = ""

    def check_and_pause(self, awaited: str) -> None:
        """Pause for a moment; report first what the wait is for, if that is new.

        Raises:
            DeadlinePassed: the limit is over.
        """
        if time.monotonic() > self._deadline:
            raise DeadlinePassed(
                Message("{} didn't come within {:g} s: {}.", awaited, self._limit, self._remedy)
            )
        # A line for each new thing that is waited for, and not one for each look.
        if awaited != self._reported and time.monotonic() >= self._loud:
            self._report(f"waiting for {awaited}")
            self._reported = awaited
        self.pause()

    def pause(self) -> None:
        """Pause for a moment of a wait that has a limit of its own and isn't worth a line."""
        self._pause(_PAUSE_S)

    def sooner(self, limit: float, remedy: str | Message) -> Deadline:
        """Return a deadline that ends sooner, if `limit` is sooner."""
        now = time.monotonic()
        left, quiet = (max(0.0, moment - now) for moment in (self._deadline, self._loud))
        return Deadline(min(limit, left), self._report, self._pause, remedy, quiet)


def no_report(line: object) -> None:
    """Report nothing of what a start waits for."""


def missing_numbers(store: Store, key_prefix: str, total: int) -> list[int]:
    """Return the machines or ranks whose key `key_prefix`/<number> is missing in the store."""
    return [i for i in range(total) if not store.check([f"{key_prefix}/{i}"])]


def describe_numbers(noun: str, missing: Sequence[int], total: int) -> str:
    """Name machines or ranks by their numbers: "machines 1, 2 of 4"."""
    return f"{noun}{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {total}"
