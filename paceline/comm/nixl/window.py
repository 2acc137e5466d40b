"""Window over NIXL: RDMA where the network has it, TCP elsewhere; one-sided in either case.

The ranks connect by TCP with the job's token (`transport/bootstrap.py`) and exchange NIXL's
metadata over these connections, which stay open as the control connections of `engine.py`. NIXL's
own connections carry no token: any process that reaches a machine's ports can talk to its UCX, so
this transport is for a network that belongs to the job.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import Tensor

from paceline.comm.nixl.agent import NixlAgent
from paceline.comm.nixl.engine import NixlEngine, Peer
from paceline.comm.transport.bootstrap import Bootstrap, receive
from paceline.comm.transport.tcp import connect_by_tcp
from paceline.comm.window import PEER_CLOSED, BlockingWindow, Source, bytes_of
from paceline.errors import CommError, CommTimeout, PeerLost

_HEAD = struct.Struct("!QI")  # the memory's address, bytes of NIXL's metadata that follow
_LARGEST_METADATA = 2**20
_READ = b"r"


def nixl_window(bootstrap: Bootstrap, address: str, size: int, notifications: int) -> NixlWindow:
    """Connect ranks by NIXL; collective.

    Args:
        bootstrap: the ranks that connect.
        address: the IP address of this machine that the peers reach.
        size: bytes of this rank's memory.
        notifications: how many each peer has.

    Raises:
        ConfigError: NIXL is not installed.
        CommError: a rank did not connect in time, or cannot be reached.
    """
    memory = torch.zeros(max(size, 1), dtype=torch.uint8)
    with ExitStack() as stack:
        agent = NixlAgent(f"paceline {bootstrap.rank}")
        stack.callback(agent.close)
        agent.memory.take(memory)
        lines = [next(iter(ends), None) for ends in connect_by_tcp(bootstrap, address)]
        for line in filter(None, lines):
            stack.callback(line.close)
        peers = _exchange_metadata(bootstrap, agent, memory, lines)
        window = NixlWindow(bootstrap.rank, memory[:size], agent, peers, notifications)
        stack.pop_all()
        return window


class NixlWindow(BlockingWindow):
    """Window over NIXL.

    Args:
        rank: this process's rank.
        memory: (bytes,) of uint8, this rank's memory, registered with the agent.
        agent: this process's NIXL agent.
        peers: the peers, by rank; None for this rank.
        notifications: the number of notification slots per peer.
    """

    def __init__(
        self,
        rank: int,
        memory: Tensor,
        agent: NixlAgent,
        peers: list[Peer | None],
        notifications: int,
    ) -> None:
        self.rank = rank
        self.world_size = len(peers)
        self.memory = memory
        self.values = np.zeros((len(peers), notifications), np.int64)
        self._engine = NixlEngine(agent, peers, self.values)
        self.close = self._engine.close
        self.interrupt = self._engine.interrupt

    def peer_memory(self, peer: int) -> Tensor | None:
        """Return nothing: peers are reached by puts."""
        return None

    def put(
        self,
        peer: int,
        offset: int,
        source: Source,
        notification: int,
        value: int,
        priority: int = 0,
    ) -> None:
        """Queue a put."""
        self._require(peer, f"a put to rank {peer}")
        data = [part for part in bytes_of(source) if part.numel()]
        self._engine.put(peer, data, offset, (notification, value), priority)

    def subscribe(self, below: int) -> None:
        """Count only notifications below a number as events."""
        self._engine.subscribed = below

    def wake(self) -> None:
        """Wake the threads that wait for an event."""
        with self._engine.changed:
            self._engine.events += 1
            self._engine.changed.notify_all()

    def flush(self, peer: int, *, limit: float, operation: str) -> None:
        """Sleep until all puts to a peer have been sent."""
        other = self._engine.peers[peer]
        self._sleep_for(peer, lambda: other is None or other.under_way == 0, limit, operation)

    @property
    def _events(self) -> int:
        return self._engine.events

    def _error(self, peer: int) -> str:
        other = self._engine.peers[peer]
        return "" if other is None else other.error

    def _sleep(self, peer: int | None, ready: Callable[[], bool], limit: float) -> None:
        with self._engine.changed:
            self._engine.changed.wait_for(ready, limit)


def _exchange_metadata(
    bootstrap: Bootstrap, agent: NixlAgent, memory: Tensor, lines: list[socket.socket | None]
) -> list[Peer | None]:
    """Exchange NIXL's metadata; return once every rank has read every other's."""
    deadline = time.monotonic() + bootstrap.limit
    metadata = agent.metadata()
    there = [(rank, line) for rank, line in enumerate(lines) if line is not None]
    for rank, line in there:
        with _named(bootstrap, rank):
            line.settimeout(bootstrap.limit)
            line.sendall(_HEAD.pack(memory.data_ptr(), len(metadata)) + metadata)
    peers = [_read_peer(bootstrap, agent, *one, deadline) for one in enumerate(lines)]
    for rank, line in there:
        with _named(bootstrap, rank):
            line.sendall(_READ)
    for rank, line in there:
        with _named(bootstrap, rank):
            _read(line, len(_READ), deadline)
    return peers


def _read_peer(
    bootstrap: Bootstrap, agent: NixlAgent, rank: int, line: socket.socket | None, deadline: float
) -> Peer | None:
    if line is None:
        return None
    with _named(bootstrap, rank):
        memory, size = _HEAD.unpack(_read(line, _HEAD.size, deadline))
        if size > _LARGEST_METADATA:
            raise ConnectionError("invalid NIXL metadata from the peer")
        return Peer(line, agent.connect(_read(line, size, deadline)), memory)


@contextmanager
def _named(bootstrap: Bootstrap, rank: int) -> Iterator[None]:
    """Name the peer in errors."""
    try:
        yield
    except TimeoutError as error:
        raise CommTimeout(
            f"rank {bootstrap.rank} timed out after {bootstrap.limit:g} s exchanging NIXL metadata "
            f"with rank {rank}."
        ) from error
    except (OSError, CommError) as error:
        raise PeerLost(
            f"rank {bootstrap.rank} cannot connect to rank {rank} with NIXL: {error}."
        ) from error


def _read(line: socket.socket, size: int, deadline: float) -> bytes:
    data = receive(line, size, deadline)
    if len(data) < size:
        raise ConnectionError(PEER_CLOSED)
    return data
