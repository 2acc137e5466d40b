"""Lease on the run's files: while it lasts, the others can't have expelled a member for silence.

    report 7 sent ──▶ all others receive it ──▶ their reports confirm 7
    └── the lease lasts for the peer timeout from here ──▶

The others expel a member once they have had no heartbeat from it for longer than the peer timeout.
They had one when they received its report, which was after it was sent. A process that was stopped,
or a whole machine, finds that its lease has ended, and writes nothing before the others confirm a
report that it sent afterwards.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from math import inf

# They span several peer timeouts: a confirmation of an older one could renew nothing.
_REPORTS = 64  # sent ones whose confirmation counts


class WriteLease:
    """Lease of a member; the control line's thread renews it, and any thread may wait for it.

    Args:
        duration: seconds that the lease lasts: the peer timeout.
        clock: returns seconds, by the machine's monotonic clock.
    """

    def __init__(
        self, member: str, duration: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._member = member
        self._duration = duration
        self._clock = clock
        self._number = 0
        self._sent: deque[tuple[int, float]] = deque(maxlen=_REPORTS)
        self._changed = threading.Condition()  # guards what follows
        self._confirmed: dict[str, float] = {}  # by member, when the last report was sent
        self._until = inf
        self._ended = False

    def enter(self, members: Iterable[str], *, renew: bool = True) -> None:
        """Begin the lease of a generation.

        Args:
            members: the ids of its members.
            renew: they have just agreed on it. Otherwise this process was stopped meanwhile, and
                what they confirmed before counts.
        """
        now = self._clock()
        before = self._confirmed
        with self._changed:
            self._confirmed = {
                member: now if renew else before.get(member, -inf)
                for member in members
                if member != self._member
            }
            self._renew()

    def send(self) -> int:
        """Return the number of the report that is sent now."""
        self._number += 1
        self._sent.append((self._number, self._clock()))
        return self._number

    def confirm(self, member: str, number: int) -> None:
        """Note that a member has received a report."""
        sent_at = dict(self._sent).get(number)
        with self._changed:
            if sent_at is not None and member in self._confirmed:
                self._confirmed[member] = max(self._confirmed[member], sent_at)
                self._renew()

    def release(self, member: str) -> None:
        """Wait no more for a member, which ends well."""
        with self._changed:
            self._confirmed.pop(member, None)
            self._renew()

    def release_all(self) -> None:
        """Let the lease last for ever: the run ends."""
        with self._changed:
            self._confirmed.clear()
            self._renew()

    def end(self) -> None:
        """End the lease for good: the others continue without this member, or none decides."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait(self, limit: float) -> bool:
        """Return whether the lease lasts; wait for that, for at most so many seconds."""
        if self.lasts:
            return True
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self.lasts, limit)
            return self.lasts

    @property
    def lasts(self) -> bool:
        """Whether the lease lasts now."""
        return not self._ended and self._clock() < self._until

    def _renew(self) -> None:
        # The least: a single member that had no report for that long may have begun the vote.
        self._until = min(self._confirmed.values(), default=inf) + self._duration
        self._changed.notify_all()
