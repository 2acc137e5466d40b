"""Bootstrap of connections between ranks, by sockets of any family, with authentication.

    rank r    listens, publishes its address, connects to ranks below r, accepts those above
    greeting  | "paceline" | digest of the token and the purpose | rank |   both ways, at once

An unauthenticated peer's connection is closed; it delays the others by one wait slice at most.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from paceline.errors import CommTimeout, Message, PeerLost

_GREETING = struct.Struct("!8s32sI")
_NAME = b"paceline"
_WAIT_SLICE_S = 5.0  # for the greeting of a connected peer


@dataclass(frozen=True, kw_only=True)
class Bootstrap:
    """Bootstrap parameters of a full mesh: rank, world size, addresses, token and timeout.

    Attributes:
        store: the store in which ranks publish their addresses; no earlier generation used it.
        share: all-gather of one string per rank, used instead of `store`.
        rank: this rank.
        world_size: the number of ranks.
        token: the generation's token; a peer without it is unauthenticated.
        purpose: what the connections are for, and the generation; each purpose is used for one
            bootstrap only.
        limit: seconds to wait until all ranks have connected.
        only: the ranks that take part; by default, all.
    """

    store: Store | None = None
    share: Callable[[str], Sequence[str]] | None = None
    rank: int
    world_size: int
    token: str
    purpose: str
    limit: float
    only: Sequence[int] = ()

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that take part, in order."""
        return self.only or range(self.world_size)

    def publish(self, where: str) -> Callable[[int], str]:
        """Publish this rank's address; return the look-up of another's."""
        if self.share is not None:
            return self.share(where).__getitem__
        store = self.store
        assert store is not None
        store.set(f"{self.purpose}/{self.rank}", where)
        return lambda peer: store.get(f"{self.purpose}/{peer}").decode()

    @property
    def greeting(self) -> bytes:
        """What this rank sends first."""
        return _GREETING.pack(_NAME, self._digest, self.rank)

    def rank_in(self, greeting: bytes) -> int | None:
        """Return the rank in a greeting; None if it is not authentic."""
        if len(greeting) != _GREETING.size:
            return None
        name, digest, rank = _GREETING.unpack(greeting)
        known = name == _NAME and hmac.compare_digest(digest, self._digest)
        return rank if known and rank < self.world_size else None

    @property
    def _digest(self) -> bytes:
        return hashlib.sha256(f"{self.token}\n{self.purpose}".encode()).digest()


def connect_all(
    bootstrap: Bootstrap,
    server: socket.socket,
    where: str,
    call: Callable[[str, float], socket.socket],
) -> list[socket.socket | None]:
    """Connect this rank with the others that take part; collective.

    Args:
        bootstrap: the ranks that connect.
        server: a listening socket of this rank.
        where: its address, as `call` understands it.
        call: connects to such an address within some seconds.

    Returns:
        a stream for each rank, None where there is no connection.

    Raises:
        PeerLost: a rank cannot be reached.
        CommTimeout: a rank did not connect in time.
    """
    deadline = time.monotonic() + bootstrap.limit
    ends: list[socket.socket | None] = [None] * bootstrap.world_size
    try:
        address_of = bootstrap.publish(where)
        for peer in (rank for rank in bootstrap.ranks if rank < bootstrap.rank):
            ends[peer] = _call(bootstrap, peer, address_of(peer), call, deadline)
        while missing := [r for r in bootstrap.ranks if r > bootstrap.rank and ends[r] is None]:
            peer, end = _answer(bootstrap, server, missing, deadline)
            ends[peer] = end
    except BaseException:
        for end in filter(None, ends):
            end.close()
        raise
    return ends


def _call(
    bootstrap: Bootstrap,
    peer: int,
    where: str,
    call: Callable[[str, float], socket.socket],
    deadline: float,
) -> socket.socket:
    try:
        end = call(where, max(0.1, deadline - time.monotonic()))
        end.sendall(bootstrap.greeting)
        answer = receive(end, _GREETING.size, max(deadline, time.monotonic() + 0.1))
    except TimeoutError as error:
        raise _missing(bootstrap, [peer]) from error
    except OSError as error:
        raise PeerLost(
            f"rank {bootstrap.rank} cannot reach rank {peer} at {where}: {error}; check firewalls."
        ) from error
    if bootstrap.rank_in(answer) != peer:
        end.close()
        raise PeerLost(
            f"rank {bootstrap.rank}: the process at {where} is not rank {peer} of this job "
            "(authentication failed)."
        )
    return end


def _answer(
    bootstrap: Bootstrap,
    server: socket.socket,
    missing: list[int],
    deadline: float,
) -> tuple[int, socket.socket]:
    """Accept one of the missing ranks, whatever other processes connect meanwhile."""
    left = max(0.1, deadline - time.monotonic())
    while left > 0:
        server.settimeout(left)
        try:
            end, _ = server.accept()
        except TimeoutError:
            break
        left = deadline - time.monotonic()
        with suppress(OSError):
            limit = min(_WAIT_SLICE_S, max(0.1, left))
            peer = bootstrap.rank_in(receive(end, _GREETING.size, time.monotonic() + limit))
            if peer in missing:
                end.sendall(bootstrap.greeting)
                return peer, end
        end.close()
        left = deadline - time.monotonic()
    raise _missing(bootstrap, missing)


def receive(end: socket.socket, size: int, deadline: float) -> bytes:
    """Receive so many bytes, or what arrived of them before the other end closed.

    Raises:
        TimeoutError: the moment of the deadline, by the monotonic clock, has passed.
    """
    data = b""
    while len(data) < size:
        end.settimeout(max(0.01, deadline - time.monotonic()))
        chunk = end.recv(size - len(data))
        if not chunk:
            break
        data += chunk
    return data


def _missing(bootstrap: Bootstrap, ranks: list[int]) -> CommTimeout:
    names = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return CommTimeout(
        Message(
            "rank {} timed out after {:g} s waiting for a connection from {}; check the output of "
            "that rank, or increase {--first_iter_timeout}.",
            bootstrap.rank,
            bootstrap.limit,
            names,
        )
    )
