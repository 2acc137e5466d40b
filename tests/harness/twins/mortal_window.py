"""Windows of a member that dies after some puts, and that count how many slots senders use."""

from __future__ import annotations

import threading
from collections import Counter

from paceline.comm.window import Source, Window, WindowWrapper
from paceline.reduce.put_engine.layout import CONTRIBUTION, PARAMETERS, SUM


class Mortal:
    """A member of an exchange, which dies after so many puts: all its windows close.

    Args:
        puts: that it makes; None: it lives.

    Attributes:
        dead: whether it has died.
    """

    def __init__(self, puts: int | None) -> None:
        self.dead = False
        self._left = puts
        self._windows: list[Window] = []
        self._lock = threading.Lock()

    def add(self, window: Window) -> None:
        """Add one of its windows."""
        with self._lock:
            self._windows.append(window)
            if self.dead:
                window.close()

    def count_put(self) -> None:
        """Count a put before it is made, perhaps the one that isn't any more."""
        with self._lock:
            if self._left is None:
                return
            self._left -= 1
            if self._left == 0:
                self.dead = True
                for window in self._windows:
                    window.close()


class SlotCounts:
    """Slots that the workers of an exchange use on servers: versions that were not returned.

    Args:
        buckets: of the exchange.
        workers: ranks below are theirs, the others are servers'.

    Attributes:
        most: the largest number of slots that one worker used for a bucket at once.
    """

    def __init__(self, buckets: int, workers: int) -> None:
        self.most = 0
        self._buckets = buckets
        self._workers = workers
        self._lock = threading.Lock()
        self._contributed: Counter[tuple[int, int, int]] = Counter()  # by worker, server and bucket
        self._returned: Counter[tuple[int, int, int]] = Counter()

    def count(self, rank: int, peer: int, notification: int, value: int) -> None:
        """Count a put of a rank, before it is made."""
        kind, bucket = divmod(notification, self._buckets)
        with self._lock:
            if kind == CONTRIBUTION and rank < self._workers <= peer:
                key = rank, peer, bucket
                assert value == self._contributed[key] + 1, f"push {value} isn't the next of {key}"
                self._contributed[key] = value
                self.most = max(self.most, value - self._returned[key])
            elif kind in (SUM, PARAMETERS) and peer < self._workers <= rank:
                key = peer, rank, bucket
                assert value == self._returned[key] + 1, f"pull {value} isn't the next of {key}"
                assert value <= self._contributed[key]
                self._returned[key] = value


class MortalWindow(WindowWrapper):
    """Window of a mortal member, whose puts are counted.

    Args:
        window: the window.
        owner: the member.
        slots: of the exchange.
    """

    def __init__(self, window: Window, owner: Mortal, slots: SlotCounts) -> None:
        super().__init__(window)
        self.wait, self.wait_for_event = window.wait, window.wait_for_event
        self.flush, self.close = window.flush, window.close
        self._owner = owner
        self._slots = slots
        owner.add(window)

    def put(
        self,
        peer: int,
        offset: int,
        source: Source,
        notification: int,
        value: int,
        priority: int = 0,
    ) -> None:
        """Put, unless the member is dead."""
        self._owner.count_put()
        if not self._owner.dead:
            self._slots.count(self.rank, peer, notification, value)
        self._window.put(peer, offset, source, notification, value, priority)
