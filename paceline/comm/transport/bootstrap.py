"""Bootstrap of connections between ranks, by sockets of any family, with authentication.

    rank r    listens, publishes its address, dials the ranks below r, accepts those above

Each connection begins with the greeting of `comm/handshake.py`, by a secret of the generation's
token, the purpose and the world size. An unauthenticated peer's connection is closed, and delays no
other.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from paceline.comm.handshake import GreetingError, Identity, Reception, authenticate, secret_of
from paceline.errors import CommTimeout, Message, PeerLost

_LEAST_S = 0.1  # for a connection, even when the others have used up the limit


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
    def identity(self) -> Identity:
        """This rank's side of the connections."""
        purpose = f"{self.purpose} of {self.world_size} ranks"
        return Identity(name=str(self.rank), secret=secret_of(self.token, purpose))


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
        _accept(bootstrap, server, ends, max(deadline, time.monotonic() + _LEAST_S))
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
        end = call(where, max(_LEAST_S, deadline - time.monotonic()))
        try:
            latest = max(deadline, time.monotonic() + _LEAST_S)
            authenticate(end, bootstrap.identity, str(peer), latest)
        except BaseException:
            end.close()
            raise
    except TimeoutError as error:
        raise _missing(bootstrap, [peer]) from error
    except OSError as error:
        raise PeerLost(
            f"rank {bootstrap.rank} cannot reach rank {peer} at {where}: {error}; check firewalls."
        ) from error
    except GreetingError as error:
        raise PeerLost(
            f"rank {bootstrap.rank}: the process at {where} is not rank {peer} of this job "
            "(authentication failed)."
        ) from error
    return end


def _accept(
    bootstrap: Bootstrap,
    server: socket.socket,
    ends: list[socket.socket | None],
    deadline: float,
) -> None:
    """Accept the ranks above this one, whatever other processes connect meanwhile."""
    missing = {str(rank): rank for rank in bootstrap.ranks if rank > bootstrap.rank}
    with closing(Reception(server, bootstrap.identity, missing.__contains__)) as reception:
        while missing:
            try:
                name, end = reception.next(deadline)
            except TimeoutError as error:
                raise _missing(bootstrap, list(missing.values())) from error
            ends[missing.pop(name)] = end


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
