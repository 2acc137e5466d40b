"""A window over connections: TCP between machines, shared memory and a local socket inside one.

    put over TCP   frames of a head and the bytes themselves (`transport/event_loop.py`)
    put inside     a copy into the peer's memory, which is mapped here, and a head without bytes

Both are one loop and one notification, so a rank has peers of either kind at once.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Callable, Sequence

from torch import Tensor

from paceline.comm.put_event import PutEvent
from paceline.comm.transport.event_loop import EVERYBODY
from paceline.comm.transport.transport import Transport
from paceline.comm.window import Source, bytes_of, tensors_of
from paceline.errors import CommTimeout, Message, PeerLost


class ConnectionWindow:
    """A rank's memory and its links.

    Args:
        rank: this process's number.
        memory: (bytes,) of uint8, this rank's.
        sockets: connected streams, of each rank; none of this one.
        reaches: the peers' memory where it is mapped here, else None.
        notifications: how many each peer has.
        marks: how many moments of puts to remember, the newest.
    """

    def __init__(
        self,
        rank: int,
        memory: Tensor,
        sockets: Sequence[Sequence[socket.socket]],
        reaches: Sequence[Tensor | None],
        notifications: int,
        marks: int = 0,
    ) -> None:
        self.rank, self.world_size = rank, len(sockets)
        self.memory = memory
        self._reaches = reaches
        self._others = [peer for peer in range(self.world_size) if peer != rank]
        self._transport = Transport(sockets, memory.numpy(), notifications, marks)
        self.values = self._transport.values
        self._ends = [end for ends in sockets for end in ends]
        _keep_from_children(weakref.ref(self))

    @property
    def moments(self) -> list[PutEvent]:
        """When puts had left and notifications came, in order."""
        return self._transport.moments

    def peer_memory(self, peer: int) -> Tensor | None:
        """Return a peer's memory if it is on this machine."""
        return self._reaches[peer]

    def put(
        self,
        peer: int,
        offset: int,
        source: Source,
        notification: int,
        value: int,
        priority: int = 0,
    ) -> None:
        """Queue a put, or copy at once where the memory is shared."""
        self._require(peer, f"a put to rank {peer}")
        data, at, shared = list(tensors_of(source)), offset, self._reaches[peer]
        if data and shared is not None:
            for piece in bytes_of(source):
                shared[at : at + piece.numel()].copy_(piece)
                at += piece.numel()
            data = []
        pieces = [(piece.data_ptr(), piece.nbytes) for piece in data if piece.numel()]
        self._transport.put(peer, pieces, (offset, notification, value), priority, data)

    def wait(
        self, peer: int, notification: int, value: int, *, limit: float, operation: str
    ) -> None:
        """Sleep until the notification has come."""
        values = self.values

        def there() -> bool:
            return bool(values[peer, notification] >= value)

        self._sleep(peer, there, limit, operation)

    def subscribe(self, below: int) -> None:
        """Tell the loop."""
        self._transport.subscribe(below)

    def wake(self) -> None:
        """Wake who waits for news."""
        self._transport.wake()

    def wait_for_event(self, seen: int, limit: float) -> int:
        """Sleep until something has come."""
        transport = self._transport
        transport.sleep(
            EVERYBODY, lambda: transport.events != seen or self._lost() is not None, limit
        )
        if transport.events == seen and (lost := self._lost()) is not None:
            self._require(lost, "waiting for news")
        return transport.events

    def flush(self, peer: int, *, limit: float, operation: str) -> None:
        """Sleep until all puts to a peer have left."""
        self._sleep(peer, lambda: not self._transport.sending(peer), limit, operation)

    def close(self) -> None:
        """End the loop and close the connections; shared memory goes with this object."""
        self._transport.close()

    def _sleep(self, peer: int, ready: Callable[[], bool], limit: float, operation: str) -> None:
        self._transport.sleep(peer, lambda: ready() or bool(self._transport.error(peer)), limit)
        if ready():
            return
        self._require(peer, operation)
        raise CommTimeout(
            Message(
                "rank {} waited {:g} s for rank {} in {}: it hangs, can't be reached, or needs a "
                "longer {--timeout}.",
                self.rank,
                limit,
                peer,
                operation,
            )
        )

    def _require(self, peer: int, operation: str) -> None:
        if error := self._transport.error(peer):
            raise PeerLost(f"rank {self.rank} lost rank {peer} in {operation}: {error}.")

    def _lost(self) -> int | None:
        if self._transport.whole:
            return None
        return next((peer for peer in self._others if self._transport.error(peer)), None)


def _keep_from_children(window: weakref.ref[ConnectionWindow]) -> None:
    """Close connections in processes forked from now on (a DataLoader's workers).

    Otherwise a connection stands for the peers as long as one of these lives.
    """

    def close() -> None:
        for end in () if (this := window()) is None else this._ends:
            end.close()

    os.register_at_fork(after_in_child=close)
