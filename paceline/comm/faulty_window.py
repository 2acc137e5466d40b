"""A window whose puts are late, overtake each other, or get lost, and that is cut off in the end.

It is for tests of what stands on a window. Each put waits for a random time before it goes,
whatever its priority, so that puts arrive in any order; its source is read only then, so that who
writes it before `flush` is found out. So is who has two puts with one notification under way, but
for those whose order is said to count.
"""

from __future__ import annotations

import heapq
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.comm.window import Source, Window
from paceline.errors import CommTimeout, PeerLost


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What goes wrong.

    Attributes:
        delay: seconds that a put is late at most.
        lost: tells of each put, by (peer, notification, value), whether it gets lost.
        cut_after: so many puts go; then all connections end, and nothing more does. None: never.
        shuffled: puts have random priorities in place of their own.
        ordered: notifications from this number on have several puts under way, whose order counts.
        seed: of the delays and priorities.
    """

    delay: float = 0.001
    lost: Callable[[int, int, int], bool] = lambda peer, notification, value: False
    cut_after: int | None = None
    shuffled: bool = False
    ordered: int = sys.maxsize
    seed: int = 0


@dataclass(order=True, frozen=True)
class _Late:
    due: float
    number: int
    peer: int
    known: tuple[int, int]
    go: Callable[[], None] = field(compare=False)


class FaultyWindow:
    """Another window, with faults.

    Attributes:
        rank, world_size, memory, values: the other's.
    """

    def __init__(self, window: Window, faults: Faults) -> None:
        self.rank, self.world_size = window.rank, window.world_size
        self.memory: Tensor = window.memory
        self.values: NDArray[np.int64] = window.values
        self._window, self._faults = window, faults
        self._random = random.Random(faults.seed)
        self._changed = threading.Condition()
        self._late: list[_Late] = []
        self._under_way: Counter[int] = Counter()
        self._notifying: dict[tuple[int, int], list[float]] = {}  # when they are due
        self._number = self._gone = 0
        self._failure: PeerLost | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._deliver, name="faults", daemon=True)
        self._thread.start()

    def peer_memory(self, peer: int) -> Tensor | None:
        """Reach as far as the other window."""
        return self._window.peer_memory(peer)

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
            raise PeerLost(f"rank {self.rank} lost rank {peer} in a put: this process closed it.")
        if self._failure is not None:
            raise self._failure
        if self._faults.lost(peer, notification, value):
            return

        ordered = notification >= self._faults.ordered
        if self._faults.shuffled and not ordered:
            priority = self._random.randrange(4)

        def go() -> None:
            self._window.put(peer, offset, source, notification, value, priority)

        with self._changed:
            known = (peer, notification)
            before = self._notifying.setdefault(known, [])
            assert ordered or not before, f"a put with {known} is still under way"
            due = time.monotonic() + self._random.uniform(0, self._faults.delay)
            due = max(due, *before) if before else due
            before.append(due)
            self._number += 1
            heapq.heappush(self._late, _Late(due, self._number, peer, known, go))
            self._under_way[peer] += 1
            self._changed.notify_all()

    def wait(
        self, peer: int, notification: int, value: int, *, limit: float, operation: str
    ) -> None:
        """Wait in the other window."""
        self._window.wait(peer, notification, value, limit=limit, operation=operation)

    def subscribe(self, below: int) -> None:
        """Hear in the other window."""
        self._window.subscribe(below)

    def wake(self) -> None:
        """Nudge the other window."""
        self._window.wake()

    def wait_for_event(self, seen: int, limit: float) -> int:
        """Wait in the other window."""
        return self._window.wait_for_event(seen, limit)

    def flush(self, peer: int, *, limit: float, operation: str) -> None:
        """Wait for the puts that are late, and then in the other window."""
        with self._changed:
            gone = self._changed.wait_for(lambda: not self._under_way[peer] or self._closed, limit)
        if not gone:
            raise CommTimeout(f"rank {self.rank} waited {limit:g} s in {operation}")
        self._window.flush(peer, limit=limit, operation=operation)

    def close(self) -> None:
        """Forget what is late, and close the other window."""
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
                self._notifying[late.known].remove(late.due)
            try:
                if self._gone == self._faults.cut_after:
                    self._window.close()
                late.go()
                self._gone += 1
            except PeerLost as error:
                self._failure = error
            with self._changed:
                self._under_way[late.peer] -= 1
                self._changed.notify_all()

    def _until_next(self) -> float:
        return self._late[0].due - time.monotonic() if self._late else 1.0
