"""In-process twin of a window: ranks are threads; a put is a copy and a notification.

group = WindowGroup(world_size=3, size=1024, notifications=8)
windows = [group.window(rank) for rank in range(3)]     # one a thread
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.comm.window import (
    PEER_CLOSED,
    THIS_PROCESS_CLOSED,
    BlockingWindow,
    Source,
    bytes_of,
)


class WindowGroup:
    """Shared state of the `InProcessWindow`s of one process.

    Args:
        world_size: the number of ranks.
        size: size of each window, in bytes.
        notifications: the number of notification slots per peer.
        machines: for each simulated machine, its ranks; by default, each rank has its own machine.
        apart: ranks that aren't connected with each other.
    """

    def __init__(
        self,
        world_size: int,
        size: int,
        notifications: int,
        machines: Sequence[int] = (),
        apart: Sequence[int] = (),
    ) -> None:
        self.world_size = world_size
        self.machine = [number for number, ranks in enumerate(machines) for _ in range(ranks)]
        self.apart = {*apart}
        self.lock = threading.RLock()
        self.changed = [threading.Condition(self.lock) for _ in range(world_size)]  # by rank
        self.closed: set[int] = set()
        self.events = [0] * world_size
        self.subscribed = [notifications] * world_size
        self.memories = [torch.zeros(size, dtype=torch.uint8) for _ in range(world_size)]
        shape = (world_size, notifications)
        self.values = [np.zeros(shape, np.int64) for _ in range(world_size)]

    def window(self, rank: int) -> InProcessWindow:
        """Return the window of one rank."""
        return InProcessWindow(self, rank)


class InProcessWindow(BlockingWindow):
    """Window between threads of one process."""

    def __init__(self, group: WindowGroup, rank: int) -> None:
        self.rank, self.world_size = rank, group.world_size
        self.memory, self.values = group.memories[rank], group.values[rank]
        self._group = group

    def peer_memory(self, peer: int) -> Tensor | None:
        """Return the memory of a peer on the same machine."""
        machine = self._group.machine
        shared = bool(machine) and machine[peer] == machine[self.rank]
        return self._group.memories[peer] if shared else None

    def put(
        self,
        peer: int,
        offset: int,
        source: Source,
        notification: int,
        value: int,
        priority: int = 0,
    ) -> None:
        """Copy and notify at once."""
        group = self._group
        with group.lock:
            assert not {self.rank, peer} <= group.apart, f"a put to rank {peer}, to which is no way"
            self._require(peer, f"a put to rank {peer}")
            for data in bytes_of(source):
                group.memories[peer][offset : offset + data.numel()].copy_(data)
                offset += data.numel()
            group.values[peer][self.rank, notification] = value
            group.events[peer] += notification < group.subscribed[peer]
            group.changed[peer].notify_all()

    def subscribe(self, below: int) -> None:
        """Count only notifications below a number as events."""
        self._group.subscribed[self.rank] = below

    def wake(self) -> None:
        """Wake the threads that wait for an event."""
        with self._group.lock:
            self._group.events[self.rank] += 1
            self._group.changed[self.rank].notify_all()

    def flush(self, peer: int, *, limit: float, operation: str) -> None:
        """Return at once: a put is complete when it returns."""

    def close(self) -> None:
        """Close; threads that wait for this rank, or in it, get `PeerLost`."""
        with self._group.lock:
            self._group.closed.add(self.rank)
            for changed in self._group.changed:
                changed.notify_all()

    interrupt = close

    @property
    def _events(self) -> int:
        return self._group.events[self.rank]

    def _error(self, peer: int) -> str:
        apart = self._group.apart
        closed = self._group.closed
        if self.rank in apart:
            closed = closed - (apart - {self.rank})
        if self.rank in closed:
            return THIS_PROCESS_CLOSED
        return PEER_CLOSED if peer in closed else ""

    def _sleep(self, peer: int | None, ready: Callable[[], bool], limit: float) -> None:
        changed = self._group.changed[self.rank]
        with changed:
            changed.wait_for(ready, limit)
