"""A window by NIXL: RDMA where the network has it, TCP elsewhere; one-sided in either case.

The ranks meet by TCP, as those of `tcp_window` do: the job's token first. What NIXL needs to know
of a peer comes over that connection, which stays as the line of `nixl_engine.py`. NIXL's own
connections carry no token: whoever can reach a machine's ports can talk to its UCX, so it is for a
network that belongs to the job.
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
from paceline.comm.nixl.engine import NixlEngine
from paceline.comm.nixl.peer import Peer
from paceline.comm.tcp_window import connect_by_tcp
from paceline.comm.transport.bootstrap import Bootstrap
from paceline.comm.window import Source, bytes_of
from paceline.errors import CommError, CommTimeout, Message, PeerLost

_CARD = struct.Struct("!QI")  # the memory's address, bytes of NIXL's card that follow
_LARGEST_CARD = 2**20
_READ = b"r"


def nixl_window(bootstrap: Bootstrap, address: str, size: int, notifications: int) -> NixlWindow:
    """Connect ranks by NIXL; collective.

    Args:
        bootstrap: who connects.
        address: the IP address of this machine that the peers reach.
        size: bytes of this rank's memory.
        notifications: how many each peer has.

    Raises:
        ConfigError: NIXL isn't installed.
        CommError: a rank didn't come in time, or can't be reached.
    """
    memory = torch.zeros(max(size, 1), dtype=torch.uint8)
    with ExitStack() as stack:
        agent = NixlAgent(f"paceline {bootstrap.rank}")
        stack.callback(agent.close)
        agent.take(memory)
        lines = [next(iter(ends), None) for ends in connect_by_tcp(bootstrap, address)]
        for line in filter(None, lines):
            stack.callback(line.close)
        peers = _meet(bootstrap, agent, memory, lines)
        window = NixlWindow(bootstrap.rank, memory[:size], agent, peers, notifications)
        stack.pop_all()
        return window


class NixlWindow:
    """A rank's memory, and its reach by NIXL.

    Args:
        rank: this process's number.
        memory: (bytes,) of uint8, registered with the agent.
        agent: this process's end of NIXL.
        peers: by rank; None for this one.
        notifications: how many each peer has.
    """

    def __init__(
        self,
        rank: int,
        memory: Tensor,
        agent: NixlAgent,
        peers: list[Peer | None],
        notifications: int,
    ) -> None:
        self.rank, self.world_size = rank, len(peers)
        self.memory = memory
        self.values = np.zeros((len(peers), notifications), np.int64)
        self._engine = NixlEngine(agent, peers, self.values)

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

    def wait(
        self, peer: int, notification: int, value: int, *, limit: float, operation: str
    ) -> None:
        """Sleep until the notification has come."""
        values = self.values

        def there() -> bool:
            return bool(values[peer, notification] >= value)

        self._sleep(peer, there, limit, operation)

    def subscribe(self, below: int) -> None:
        """Count fewer notifications."""
        self._engine.subscribed = below

    def wake(self) -> None:
        """Wake who waits for news."""
        with self._engine.changed:
            self._engine.events += 1
            self._engine.changed.notify_all()

    def wait_for_event(self, seen: int, limit: float) -> int:
        """Sleep until something has come."""
        engine = self._engine
        with engine.changed:
            engine.changed.wait_for(
                lambda: engine.events != seen or self._lost() is not None, limit
            )
            if engine.events == seen and (lost := self._lost()) is not None:
                self._require(lost, "waiting for news")
            return engine.events

    def flush(self, peer: int, *, limit: float, operation: str) -> None:
        """Sleep until all puts to a peer have left."""
        other = self._engine.peers[peer]
        self._sleep(peer, lambda: other is None or other.under_way == 0, limit, operation)

    def close(self) -> None:
        """End the engine and close the lines."""
        self._engine.close()

    def _sleep(self, peer: int, ready: Callable[[], bool], limit: float, operation: str) -> None:
        changed = self._engine.changed
        with changed:
            changed.wait_for(lambda: ready() or bool(self._error(peer)), limit)
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

    def _error(self, peer: int) -> str:
        other = self._engine.peers[peer]
        return "" if other is None else other.error

    def _require(self, peer: int, operation: str) -> None:
        if error := self._error(peer):
            raise PeerLost(f"rank {self.rank} lost rank {peer} in {operation}: {error}.")

    def _lost(self) -> int | None:
        return next((peer for peer in range(self.world_size) if self._error(peer)), None)


def _meet(
    bootstrap: Bootstrap, agent: NixlAgent, memory: Tensor, lines: list[socket.socket | None]
) -> list[Peer | None]:
    """Exchange cards on the lines; return once all have read all of them."""
    deadline = time.monotonic() + bootstrap.limit
    card = agent.card()
    there = [(rank, line) for rank, line in enumerate(lines) if line is not None]
    for rank, line in there:
        with _named(bootstrap, rank):
            line.settimeout(bootstrap.limit)
            line.sendall(_CARD.pack(memory.data_ptr(), len(card)) + card)
    peers = [_hear_of(bootstrap, agent, *one, deadline) for one in enumerate(lines)]
    for rank, line in there:
        with _named(bootstrap, rank):
            line.sendall(_READ)
    for rank, line in there:
        with _named(bootstrap, rank):
            _read(line, len(_READ), deadline)
    return peers


def _hear_of(
    bootstrap: Bootstrap, agent: NixlAgent, rank: int, line: socket.socket | None, deadline: float
) -> Peer | None:
    if line is None:
        return None
    with _named(bootstrap, rank):
        memory, size = _CARD.unpack(_read(line, _CARD.size, deadline))
        if size > _LARGEST_CARD:
            raise ConnectionError("what it sent is no card")
        return Peer(line, agent.meet(_read(line, size, deadline)), memory)


@contextmanager
def _named(bootstrap: Bootstrap, rank: int) -> Iterator[None]:
    """Name who is silent, or gone."""
    try:
        yield
    except TimeoutError as error:
        raise CommTimeout(
            f"rank {bootstrap.rank} waited {bootstrap.limit:g} s to meet rank {rank} by NIXL."
        ) from error
    except (OSError, CommError) as error:
        raise PeerLost(f"rank {bootstrap.rank} can't meet rank {rank} by NIXL: {error}.") from error


def _read(line: socket.socket, size: int, deadline: float) -> bytes:
    said = b""
    while len(said) < size:
        line.settimeout(max(0.01, deadline - time.monotonic()))
        part = line.recv(size - len(said))
        if not part:
            raise ConnectionError("it closed its connection")
        said += part
    return said
