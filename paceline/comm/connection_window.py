"""Window over connections: TCP between machines; shared memory and a local socket inside one.

    put over TCP          frames of a head and the bytes themselves (`transport/event_loop.py`)
    put inside a machine  a copy into the peer's mapped memory, and a head without bytes

One event loop carries both and notifies alike, so a rank has peers of either kind at once.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from torch import Tensor

from paceline.comm.forked_children import close_in_children
from paceline.comm.transport.bootstrap import Bootstrap
from paceline.comm.transport.event_loop import ANY_PEER
from paceline.comm.transport.shared_memory import connect_locally, share_memory
from paceline.comm.transport.tcp import connect_by_tcp, probe_silent_peers
from paceline.comm.transport.transport import Transport
from paceline.comm.window import BlockingWindow, PutEvent, Source, bytes_of


def connect_window(
    bootstrap: Bootstrap,
    group_peers: Sequence[int],
    address: str,
    size: int,
    notifications: int,
    marks: int = 0,
    connections: int = 1,
    silence_limit: float = 0.0,
) -> ConnectionWindow:
    """Open a window: shared memory with the ranks of this machine, TCP with others; collective.

    Args:
        bootstrap: the ranks that connect.
        group_peers: the ranks of this machine, this one included.
        address: the IP address of this machine that the peers reach.
        size: bytes of this rank's memory, the same on all ranks.
        notifications: how many each peer has.
        marks: how many put events to keep, the newest.
        connections: TCP connections to each rank of another machine.
        silence_limit: seconds after which a machine that the network can't reach counts as lost,
            where nothing is sent and no wait has a limit; 0: none.

    Raises:
        CommError: a rank did not connect in time, or cannot be reached.
    """
    intra_machine = replace(bootstrap, purpose=f"{bootstrap.purpose}/machine", only=group_peers)
    others = [rank for rank in bootstrap.ranks if rank == bootstrap.rank or rank not in group_peers]
    inter_machine = replace(bootstrap, only=others)
    with ExitStack() as stack:
        ends = connect_locally(intra_machine)
        for end in filter(None, ends):
            stack.callback(end.close)
        memory, mapped = share_memory(intra_machine, ends, size)
        streams = connect_by_tcp(inter_machine, address, connections)
        if silence_limit:
            probe_silent_peers(streams, silence_limit)
        for peer, local_end in enumerate(ends):
            if local_end is not None:
                streams[peer] = [local_end]
        window = ConnectionWindow(
            bootstrap.rank, memory, streams, mapped, notifications, marks=marks
        )
        stack.pop_all()
        return window


class ConnectionWindow(BlockingWindow):
    """Window over TCP and shared memory.

    `close` stops the transport; the shared memory is released with this object.

    Args:
        rank: this process's rank.
        memory: (bytes,) of uint8, this rank's memory.
        sockets: for each rank, its connected streams; empty for this rank.
        mapped: for each rank, its memory if it is mapped into this process, else None.
        notifications: the number of notification slots per peer.
        marks: the number of newest put events to retain.
    """

    def __init__(
        self,
        rank: int,
        memory: Tensor,
        sockets: Sequence[Sequence[socket.socket]],
        mapped: Sequence[Tensor | None],
        notifications: int,
        marks: int = 0,
    ) -> None:
        self.rank = rank
        self.world_size = len(sockets)
        self.memory = memory
        self._mapped = mapped
        self._transport = transport = Transport(sockets, memory.numpy(), notifications, marks)
        self.values = transport.values
        self.subscribe = transport.subscribe
        self.wake = transport.wake
        self.close = transport.close
        self.interrupt = transport.interrupt
        self._ends = [end for ends in sockets for end in ends]
        close_in_children(self, _close_ends)

    @property
    def moments(self) -> list[PutEvent]:
        """When puts were sent and notifications arrived, in order."""
        return self._transport.moments

    def peer_memory(self, peer: int) -> Tensor | None:
        """Return a peer's memory if the peer is on this machine."""
        return self._mapped[peer]

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
        data = [] if source is None else [source] if isinstance(source, Tensor) else list(source)
        at = offset
        shared = self._mapped[peer]
        if data and shared is not None:
            for piece in bytes_of(source):
                shared[at : at + piece.numel()].copy_(piece)
                at += piece.numel()
            data = []
        pieces = [(piece.data_ptr(), piece.nbytes) for piece in data if piece.numel()]
        self._transport.put(peer, pieces, (offset, notification, value), priority, data)

    def flush(self, peer: int, *, limit: float, operation: str) -> None:
        """Sleep until all puts to a peer have been sent."""
        self._sleep_for(peer, lambda: not self._transport.sending(peer), limit, operation)

    @property
    def _events(self) -> int:
        return self._transport.events

    def _error(self, peer: int) -> str:
        return self._transport.error(peer)

    def _sleep(self, peer: int | None, ready: Callable[[], bool], limit: float) -> None:
        self._transport.sleep(ANY_PEER if peer is None else peer, ready, limit)

    def _lost(self) -> int | None:
        transport = self._transport
        if transport.whole:
            return None
        lost = [p for p in range(self.world_size) if p != self.rank and transport.error(p)]
        return min(lost, key=transport.ended_as, default=None)


def _close_ends(window: ConnectionWindow) -> None:
    for end in window._ends:
        end.close()
