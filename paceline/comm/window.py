"""The window protocol: one-sided communication by puts with notification.

The contract is GASPI's (https://gaspi.de, "write with notification"):

    rank 0                                   rank 1
    put(1, offset, gradient, k, value=7) ──▶ memory[offset:] = gradient, and then
                                             values[0, k] = 7
                                             wait(0, k, 7) returns

A notification implies that its data has landed; a put of a higher priority may overtake. There are
no acknowledgements and no matching receives: the protocol above (`reduce/put_engine`) decides which
rank may write where, and when. A window lives for one generation, with its memory and connections,
so that a late write of a stopped process reaches nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import CommTimeout, Message, PeerLost

Source = Tensor | Sequence[Tensor] | None
THIS_PROCESS_CLOSED = "this process closed the connection"
PEER_CLOSED = "the peer closed the connection"
INVALID_PUT = "protocol error: the peer sent an invalid put header"


class Window(Protocol):
    """Protocol of one-sided communication: this rank's memory, and puts into peers' memory.

    Attributes:
        rank: this process's rank.
        world_size: the number of ranks.
        memory: (bytes,) of uint8, this rank's memory, into which peers write.
        values: (world_size, notifications), the last value that each peer has notified, initially
            0. Once a value can be read here, the data of the peer's puts up to that value is in
            `memory`.
    """

    rank: int
    world_size: int
    memory: Tensor
    values: NDArray[np.int64]

    def peer_memory(self, peer: int) -> Tensor | None:
        """Return a peer's memory where this process maps it; None where only puts reach it."""

    def put(
        self,
        peer: int,
        offset: int,
        source: Source,
        notification: int,
        value: int,
        priority: int = 0,
    ) -> None:
        """Start to copy `source` into a peer's memory, then to notify the peer; never block.

        Args:
            peer: another rank.
            offset: bytes from the start of the peer's memory.
            source: dense, of any dtype, on the CPU; not to be written until `flush`. Several
                tensors land one behind another. None: only notify, of what was written through
                `peer_memory` before.
            notification: which of the peer's values of this rank to set. Puts under way with the
                same notification land in order if their priorities are equal; whatever was
                written through shared memory before has landed too.
            value: what to set it to; larger than the last one.
            priority: smaller numbers go first; among equals, the earlier put.

        Raises:
            PeerLost: the peer's connection ended.
            CommError: too many puts are under way.
        """

    def wait(
        self, peer: int, notification: int, value: int, *, limit: float, operation: str
    ) -> None:
        """Return once a peer's notification has reached a value.

        Raises:
            PeerLost: the peer's connection ended before; names the peer and the operation.
            CommTimeout: `limit` seconds have passed; names both, too.
        """

    def subscribe(self, below: int) -> None:
        """Count only notifications with smaller numbers as events; at first all count."""

    def wake(self) -> None:
        """Count an event of this process: `wait_for_event` returns."""

    def wait_for_event(self, seen: int, limit: float) -> int:
        """Return the number of events once it differs from `seen`, or at the limit.

        Raises:
            PeerLost: a peer's connection ended.
        """

    def lost_first(self, error: PeerLost) -> PeerLost:
        """Return the same error, but for the peer whose connection ended before all others.

        A rank ends when it loses another one, and a third rank may notice the ends of both at once:
        the first one is the cause.
        """

    def flush(self, peer: int, *, limit: float, operation: str) -> None:
        """Return once the sources of all puts to a peer may be written again.

        Raises:
            PeerLost, CommTimeout: as `wait`.
        """

    def close(self) -> None:
        """Give up connections and memory; waiting threads get `PeerLost`, and no put is sent."""

    def interrupt(self) -> None:
        """End all waits with `PeerLost`, now and later; may be called from another thread.

        Nothing is released: `close` does that.
        """


class BlockingWindow(ABC):
    """Base class of windows whose waits block until a condition holds or a connection ends.

    Attributes:
        rank, world_size, values: as in `Window`.
    """

    rank: int
    world_size: int
    values: NDArray[np.int64]

    def wait(
        self, peer: int, notification: int, value: int, *, limit: float, operation: str
    ) -> None:
        """Sleep until the notification has come."""
        values = self.values
        self._sleep_for(peer, lambda: bool(values[peer, notification] >= value), limit, operation)

    def wait_for_event(self, seen: int, limit: float) -> int:
        """Sleep until there is an event."""
        self._sleep(None, lambda: self._events != seen or self._lost() is not None, limit)
        if self._events == seen and (lost := self._lost()) is not None:
            self._require(lost, "waiting for notifications")
        return self._events

    def lost_first(self, error: PeerLost) -> PeerLost:
        """Name the peer that was lost first."""
        peer = self._lost()
        if peer is None or error.cause == THIS_PROCESS_CLOSED or not (cause := self._error(peer)):
            return error
        return PeerLost(rank=self.rank, peer=peer, operation=error.operation, cause=cause)

    @property
    @abstractmethod
    def _events(self) -> int:
        """The number of events so far."""

    @abstractmethod
    def _error(self, peer: int) -> str:
        """Return why the connection to a peer ended; "" as long as it is open."""

    @abstractmethod
    def _sleep(self, peer: int | None, ready: Callable[[], bool], limit: float) -> None:
        """Sleep until a condition holds, or for `limit` seconds.

        Args:
            peer: the condition changes with what this peer does; None: with any event.
            ready: the condition.
            limit: seconds.
        """

    def _sleep_for(
        self, peer: int, ready: Callable[[], bool], limit: float, operation: str
    ) -> None:
        """Sleep until a condition holds; raises as `Window.wait`."""
        self._sleep(peer, lambda: ready() or bool(self._error(peer)), limit)
        if not ready():
            self._require(peer, operation)
            raise timed_out(self.rank, limit, f"rank {peer}", operation)

    def _require(self, peer: int, operation: str) -> None:
        """Raise PeerLost if the connection to a peer has ended."""
        if error := self._error(peer):
            raise PeerLost(rank=self.rank, peer=peer, operation=operation, cause=error)

    def _lost(self) -> int | None:
        """Return the peer whose connection ended first, as far as that is known; None: none has."""
        others = (peer for peer in range(self.world_size) if peer != self.rank)
        return next((peer for peer in others if self._error(peer)), None)


class WindowWrapper:
    """Base class of wrappers that replace some methods of a window and delegate the others.

    Attributes:
        rank, world_size, memory, values: those of the wrapped window.
    """

    def __init__(self, window: Window) -> None:
        self._window = window
        self.rank = window.rank
        self.world_size = window.world_size
        self.memory = window.memory
        self.values = window.values
        self.peer_memory = window.peer_memory
        self.subscribe = window.subscribe
        self.wake = window.wake
        self.lost_first = window.lost_first
        self.interrupt = window.interrupt


class PutEvent(NamedTuple):
    """Timestamp of a put's completion here, or of the arrival of a peer's notification.

    Attributes:
        arrived: True: the peer's notification arrived here; False: the put to the peer was sent.
        peer: the other rank.
        notification, value: the notification's number and value.
        at: the time, in nanoseconds of the system's monotonic clock.
    """

    arrived: bool
    peer: int
    notification: int
    value: int
    at: int


def bytes_of(source: Source) -> list[Tensor]:
    """View dense tensors' memory, in whatever order their values are, as (bytes,) of uint8 each."""
    tensors = [] if source is None else [source] if isinstance(source, Tensor) else source
    return [
        tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8) for tensor in tensors
    ]


def timed_out(
    rank: int,
    limit: float,
    peer: str,
    operation: str,
    cause: str = "it hangs, can't be reached",
) -> CommTimeout:
    """Return the error of a rank's wait that has ended at its limit, in seconds."""
    return CommTimeout(
        Message(
            "rank {} waited {:g} s for {} in {}: {}, or needs a longer {--timeout} "
            "({--first_iter_timeout} at the start).",
            rank,
            limit,
            peer,
            operation,
            cause,
        )
    )
