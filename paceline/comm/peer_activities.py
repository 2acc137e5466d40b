"""Limits of waits for peers, which don't count the time in which a peer works outside a step.

    with WaitLimit(seconds, activities, "bucket 3 in step 7") as limit:
        while not ready(within=limit.slice()):
            if limit.look(): …                the limit is over

A rank that works outside a step, such as rank 0 in an evaluation of its own, is not silent: the
others wait for it, up to `--idle_timeout`. `PeerActivities` knows of it; its base class knows
nothing of the peers, and each wait has its own limit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, Self

LOOK_S = 1.0
"""Seconds of a wait before it looks at what the peers do, and between two looks."""


class PeerActivities:
    """Activities of this rank and its peers, in steps and between them; this class knows no peer.

    The training thread reports what this rank does.

    Attributes:
        longest: seconds by which a wait may be extended, at most.
    """

    longest = 0.0

    def begin_step(self, number: int) -> None:
        """Report that this rank is in a step, until `end_step`."""

    def end_step(self, *, done: bool) -> None:
        """Report that this rank has left its step.

        Args:
            done: the step was made.
        """

    @contextmanager
    def call(self, call: str, *, checked: bool = True, remedy: str = "") -> Iterator[None]:
        """Report that the block is of a call that all ranks make, in the same order.

        Args:
            call: the call, or the place in the script that all ranks reach, if there is a remedy.
            checked: a peer that makes another call meanwhile is an error.
            remedy: what to do then, a sentence; "": to make the call on all ranks.
        """
        yield

    def begin_waiting(self) -> bool:
        """Report that this rank waits outside a step; return whether it does."""
        return False

    def end_waiting(self) -> None:
        """Report that this rank works again."""

    def look(self, operation: str, busy: dict[str, float], passed: float) -> float:
        """Look at the peers in a wait for them, from any thread; return the seconds to extend it.

        Args:
            operation: what is waited for.
            busy: seconds for which each peer has worked outside a step in this wait, without a
                break, by its id; brought up to date.
            passed: seconds since the last look.

        Raises:
            IdleTimeout: a peer has worked outside a step for too long.
            ConfigError: a peer makes another call than this rank.
        """
        return 0.0

    def close(self) -> None:
        """Report that this rank has left the world."""


NO_PEERS = PeerActivities()


class WaitLimit:
    """Limit of one wait; a context manager for as long as the wait lasts.

    Args:
        seconds: how long it may last while no peer works outside a step.
        activities: what the peers do.
        operation: what is waited for.
        extends: whether time in which a peer works outside a step isn't counted.
    """

    def __init__(
        self, seconds: float, activities: PeerActivities, operation: str, *, extends: bool = True
    ) -> None:
        self.seconds = seconds
        self.operation = operation
        self._activities = activities
        self._extends = extends
        self._looked_at = time.monotonic()
        self._ends_at = self._looked_at + seconds
        self._busy: dict[str, float] = {}
        self._waiting: bool | None = None  # whether it is reported; None: not looked at yet

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._waiting:
            self._activities.end_waiting()

    def slice(self, longest: float = LOOK_S) -> float:
        """Return for how many seconds to wait before the next look; 0 at the limit."""
        return max(0.0, min(longest, self._ends_at - time.monotonic()))

    def look(self) -> bool:
        """Return whether the limit is over.

        Raises:
            IdleTimeout, ConfigError: as `PeerActivities.look`.
        """
        now = time.monotonic()
        if now >= min(self._looked_at + LOOK_S, self._ends_at):
            # Only after a second: most waits end before that, and would report nothing but noise.
            if self._waiting is None:
                self._waiting = self._activities.begin_waiting()
            longer = self._activities.look(self.operation, self._busy, now - self._looked_at)
            self._looked_at = now
            if self._extends:
                self._ends_at += longer
        return now >= self._ends_at


class Startup(Protocol):
    """Protocol of waits whose timeout is longer until all ranks have made a first step."""

    def end_startup(self) -> None:
        """Use the timeout of later steps from now on."""


class Timeout:
    """Timeout of each wait for a peer: one value in the first step, and another in later steps.

    That of the first step isn't extended, because it covers what ranks do outside steps as well. A
    later generation has one value for all steps.

    Args:
        first: seconds in the first step.
        later: seconds in later steps.
        activities: what the peers do; they may extend a wait.

    Attributes:
        seconds: the present timeout, in seconds.
        later: seconds in later steps.
    """

    def __init__(self, first: float, later: float, activities: PeerActivities = NO_PEERS) -> None:
        self.seconds = first
        self.later = later
        self._activities = activities
        self._extends = first == later

    def end_startup(self) -> None:
        """Use the timeout of later steps from now on: all ranks have exchanged a step."""
        self.seconds = self.later
        self._extends = True

    def limit(self, operation: str, seconds: float | None = None) -> WaitLimit:
        """Return the limit of a wait that begins: `seconds`, or the present timeout."""
        limit = self.seconds if seconds is None else seconds
        return WaitLimit(limit, self._activities, operation, extends=self._extends)
