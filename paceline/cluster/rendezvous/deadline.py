"""Waiting for other machines: a limit, a line that names what is waited for, and a pause."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from torch._C._distributed_c10d import Store

from paceline.cluster.print_message import print_message
from paceline.cluster.rendezvous.start_events import StartEvents
from paceline.errors import CommError, Message

_PAUSE_S = 0.1


class DeadlinePassed(CommError):
    """Error of a start in which an awaited event didn't happen before the deadline."""


class WaitReport(Protocol):
    """Protocol of what reports a start's waits to the user."""

    def report(self, awaited: str) -> None:
        """Report what the start waits for, whenever that changes."""


class PrintedWaits:
    """Report of a start's waits by lines on standard error.

    Args:
        remedy: what the user can do, as the end of each line; "": nothing is said.
    """

    def __init__(self, remedy: str = "") -> None:
        self._remedy = remedy

    def report(self, awaited: str) -> None:
        """Print a line."""
        ending = f": {self._remedy}." if self._remedy else ""
        print_message(f"waiting for {awaited}{ending}")


class Deadline:
    """Deadline shared by all waits of one start.

    Args:
        limit: seconds from now to the deadline.
        remedy: what the user can do, as the end of the error's sentence.
        waits: reports the waits; None: nothing is reported.
        events: may end a wait; None: nothing does but the deadline.
        quiet: seconds from now in which nothing is reported.
    """

    def __init__(
        self,
        limit: float,
        remedy: str | Message,
        *,
        waits: WaitReport | None = None,
        events: StartEvents | None = None,
        quiet: float = 0.0,
    ) -> None:
        self._loud = time.monotonic() + quiet
        self._limit = limit
        self._deadline = time.monotonic() + limit
        self._waits = waits
        self._events = events
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
            if self._waits is not None:
                self._waits.report(awaited)
            self._reported = awaited
        self.pause()

    def pause(self) -> None:
        """Pause for a moment of a wait that has a limit of its own and isn't worth a line."""
        if self._events is None:
            time.sleep(_PAUSE_S)
        else:
            self._events.pause(_PAUSE_S)

    def sooner(self, limit: float, remedy: str | Message) -> Deadline:
        """Return a deadline that ends sooner, if `limit` is sooner."""
        now = time.monotonic()
        left = max(0.0, self._deadline - now)
        quiet = max(0.0, self._loud - now)
        return Deadline(
            min(limit, left), remedy, waits=self._waits, events=self._events, quiet=quiet
        )


def missing_numbers(store: Store, key_prefix: str, total: int) -> list[int]:
    """Return the machines or ranks whose key `key_prefix`/<number> is missing in the store."""
    return [i for i in range(total) if not store.check([f"{key_prefix}/{i}"])]


def describe_numbers(noun: str, missing: Sequence[int], total: int) -> str:
    """Name machines or ranks by their numbers: "machines 1, 2 of 4"."""
    return f"{noun}{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {total}"
