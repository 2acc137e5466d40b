"""Waits for peers: their limits count no time in which a peer works outside a step.

    limit = WaitLimit(seconds, waits, "bucket 3 in step 7")
    while not ready(within=limit.slice()):
        if limit.look(): …                the limit is over
    limit.end()

A rank that works outside a step, such as rank 0 in an evaluation of its own, is not silent: the
others wait for it, up to `--idle_timeout`. `PeerWaits` is where they learn of it; its base class
knows nothing of the peers, and each wait has its own limit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

LOOK_S = 1.0
"""Seconds of a wait before it looks at what the peers do, and between two looks."""


class PeerWait:
    """One wait for peers, from the moment at which it has lasted `LOOK_S`."""

    def look(self) -> float:
        """Return for how many seconds, since the last look, a peer worked outside a step.

        Raises:
            IdleTimeout: a peer has done so for too long.
            ConfigError: a peer makes another call than this rank.
        """
        return 0.0

    def end(self) -> None:
        """End the wait."""


class PeerWaits:
    """What this rank and its peers do between and in steps; this base class knows of no peer.

    The training thread reports what this rank does.

    Attributes:
        longest: seconds by which a wait may be extended, at most.
    """

    longest = 0.0

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Report that this rank is in a step for as long as the block lasts.

        Args:
            number: the step's number.
        """
        yield

    @contextmanager
    def call(self, call: str, *, checked: bool = True, remedy: str = "") -> Iterator[None]:
        """Report that the block is of a call that all ranks make, in the same order.

        Args:
            call: the call, or the place in the script that all ranks reach, if there is a remedy.
            checked: a peer that makes another call meanwhile is an error.
            remedy: what to do then, a sentence; "": to make the call on all ranks.
        """
        yield

    def begin(self, operation: str) -> PeerWait:
        """Begin to look at the peers, in a wait for them; from any thread."""
        return PeerWait()

    def close(self) -> None:
        """Report that this rank has left the world."""


NO_PEERS = PeerWaits()


class WaitLimit:
    """Limit of one wait.

    Args:
        seconds: how long it may last while no peer works outside a step.
        waits: knows what the peers do.
        operation: what is waited for.
        extends: whether time in which a peer works outside a step isn't counted.
    """

    def __init__(
        self, seconds: float, waits: PeerWaits, operation: str, *, extends: bool = True
    ) -> None:
        self._waits, self._operation, self._extends = waits, operation, extends
        self._ends_at = time.monotonic() + seconds
        self._looks_at = time.monotonic() + LOOK_S
        self._wait: PeerWait | None = None

    def slice(self, longest: float = LOOK_S) -> float:
        """Return for how many seconds to wait before the next look; 0 at the limit."""
        return max(0.0, min(longest, self._ends_at - time.monotonic()))

    def look(self) -> bool:
        """Return whether the limit is over.

        Raises:
            IdleTimeout, ConfigError: as `PeerWait.look`.
        """
        now = time.monotonic()
        if now >= min(self._looks_at, self._ends_at):
            self._looks_at = now + LOOK_S
            if self._wait is None:
                self._wait = self._waits.begin(self._operation)
            busy = self._wait.look()
            self._ends_at += busy if self._extends else 0.0
        return now >= self._ends_at

    def end(self) -> None:
        """End the wait."""
        if self._wait is not None:
            self._wait.end()
