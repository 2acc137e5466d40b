"""Fault-injecting wrapper: a window whose puts are late, overtake each other, or get lost.

It is for tests of what uses a window. Each put waits for a random time before it goes, whatever its
priority, so that puts arrive in any order. The source is read only then, so that a write to it
before `flush` is found out; so are two puts under way with one notification, except those whose
order counts.
"""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.comm.window import THIS_PROCESS_CLOSED, Source, Window, WindowWrapper, timed_out
from paceline.errors import CommError, PeerLost


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Fault-injection settings for `FaultyWindow`.

    Attributes:
        delay: the largest delay of a put, in seconds.
        lost: returns whether the put with a given (peer, notification, value) gets lost.
        cut_after: the number of puts that are sent before all connections end; None: they stay
            open.
        shuffled: whether puts get random priorities instead of their own.
        ordered: puts of notifications with these numbers are kept in order, because several of
            them may be in flight to one peer at once.
        seed: seed of the random delays and priorities.
    """

    delay: float = 0.001
    lost: Callable[[int, int, int], bool] = lambda peer, notification, value: False
    cut_after: int | None = None
    shuffled: bool = False
    ordered: range = range(0)
    seed: int = 0


@dataclass(order=True, frozen=True)
class _Late:
    """Delayed put; delayed puts are sorted by due time."""

    due: float
    number: int
    peer: int
    key: tuple[int, int]
    go: Callable[[], None] = field(compare=False)


class FaultyWindow(WindowWrapper):
    """Fault-injecting wrapper around a window.

    Attributes:
        rank, world_size, memory, values: those of the wrapped window.
    """

    def __init__(self, window: Window, faults: Faults) -> None:
        super().__init__(window)
        self.wait, self.wait_for_event = window.wait, window.wait_for_event
        self._faults = faults
        self._random = random.Random(faults.seed)
        self._changed = threading.Condition()
        self._late: list[_Late] = []
        self._under_way: Counter[int] = Counter()
        self._notifying: dict[tuple[int, int], list[float]] = {}  # when they are due
        self._number = self._gone = 0
        self._failure: CommError | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._deliver, name="faults", daemon=True)
        self._thread.start()

    def put(
        self,
        peer: int,
        offset: int,
        source: Source,
        notification: int,
        value: int,
        priority: int = 0,
    ) -> None:
        """Put later, or never."""
        if self._closed:
            raise PeerLost(rank=self.rank, peer=peer, operation="a put", cause=THIS_PROCESS_CLOSED)
        if self._failure is not None:
            raise self._failure
        if self._faults.lost(peer, notification, value):
            return

        ordered = notification in self._faults.ordered
        if self._faults.shuffled and not ordered:
            priority = self._random.randrange(4)

        def go() -> None:
            self._window.put(peer, offset, source, notification, value, priority)

        with self._changed:
            key = (peer, notification)
            before = self._notifying.setdefault(key, [])
            assert ordered or not before, f"a put with {key} is still under way"
            due = time.monotonic() + self._random.uniform(0, self._faults.delay)
            due = max(due, *before) if before else due
            before.append(due)
            self._number += 1
            heapq.heappush(self._late, _Late(due, self._number, peer, key, go))
            self._under_way[peer] += 1
            self._changed.notify_all()

    def flush(self, peer: int, *, limit: float, operation: str) -> None:
        """Wait for the late puts, then in the other window."""
        with self._changed:
            gone = self._changed.wait_for(lambda: not self._under_way[peer] or self._closed, limit)
        if not gone:
            raise timed_out(self.rank, limit, f"rank {peer}", operation)
        self._window.flush(peer, limit=limit, operation=operation)

    def close(self) -> None:
        """Drop the late puts, and close the other window."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._window.close()

    def _deliver(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (left := self._until_next()) > 0:
                    self._changed.wait(left if self._late else None)
                if self._closed:
                    return
                late = heapq.heappop(self._late)
                self._notifying[late.key].remove(late.due)
            try:
                if self._gone == self._faults.cut_after:
                    self._window.close()
                late.go()
                self._gone += 1
            except CommError as error:
                self._failure = error
            with self._changed:
                self._under_way[late.peer] -= 1
                self._changed.notify_all()

    def _until_next(self) -> float:
        return self._late[0].due - time.monotonic() if self._late else 1.0
