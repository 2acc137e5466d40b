"""Bootstrap of connections between ranks, by sockets of any family, with authentication.

    rank r    listens, publishes its address, dials the ranks below r and accepts those above

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
from typing import Protocol

from paceline.comm.handshake import DialError, GreetingError, Handshakes, Identity, secret_of
from paceline.errors import CommError, CommTimeout, Message, PeerLost

_LEAST_S = 0.1  # for a connection, even when the others have used up the limit
_LOOK_S = 0.5  # of a wait for a greeting, before a look whether it is still needed
_DIAL_S = 3.0  # likewise of a dial, which no machine answers that is gone


class Addresses(Protocol):
    """Protocol of what gives each rank the addresses of the others."""

    def publish(self, purpose: str, rank: int, where: str) -> None:
        """Publish this rank's address for a purpose; collective, where ranks gather them."""

    def find(self, purpose: str, rank: int) -> str:
        """Return the address of another rank for a purpose, once it is published."""

    def check(self) -> None:
        """Return if the ranks still connect by these addresses; called now and then in a wait.

        Raises:
            CommError: they don't.
        """


@dataclass(frozen=True, kw_only=True)
class Bootstrap:
    """Bootstrap parameters of a full mesh: rank, world size, addresses, token and timeout.

    Attributes:
        addresses: gives each rank the addresses of the others.
        rank: this rank.
        world_size: the number of ranks.
        token: the generation's token; a peer without it is unauthenticated.
        purpose: what the connections are for, and the generation; each purpose is used for one
            bootstrap only.
        limit: seconds to wait until all ranks have connected.
        only: the ranks that take part; by default, all.
    """

    addresses: Addresses
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
        CommError: as `Addresses.check`.
    """
    deadline = time.monotonic() + bootstrap.limit
    missing = {str(rank): rank for rank in bootstrap.ranks if rank != bootstrap.rank}
    addresses: dict[int, str] = {}  # of the ranks below
    # The ranks above, until they have connected.
    dialers = {name for name, rank in missing.items() if rank > bootstrap.rank}
    ends: list[socket.socket | None] = [None] * bootstrap.world_size
    try:
        with closing(Handshakes(server, bootstrap.identity, dialers, len(missing))) as handshakes:
            bootstrap.addresses.publish(bootstrap.purpose, bootstrap.rank, where)
            for peer in (rank for rank in bootstrap.ranks if rank < bootstrap.rank):
                addresses[peer] = bootstrap.addresses.find(bootstrap.purpose, peer)
                _dial(bootstrap, handshakes, peer, addresses[peer], call, deadline)
            latest = max(deadline, time.monotonic() + _LEAST_S)
            while missing:
                look = time.monotonic() + _LOOK_S
                try:
                    name, end = handshakes.next(min(look, latest))
                except TimeoutError as error:
                    if look >= latest:
                        raise _missing(bootstrap, list(missing.values())) from error
                    bootstrap.addresses.check()
                    continue
                except DialError as error:
                    peer = missing[error.peer]
                    raise _unreached(bootstrap, peer, addresses[peer], error.reason) from error
                dialers.discard(name)
                ends[missing.pop(name)] = end
    except BaseException:
        for opened in filter(None, ends):
            opened.close()
        raise
    return ends


def _dial(
    bootstrap: Bootstrap,
    handshakes: Handshakes,
    peer: int,
    where: str,
    call: Callable[[str, float], socket.socket],
    deadline: float,
) -> None:
    left = max(_LEAST_S, deadline - time.monotonic())
    while True:
        try:
            end = call(where, min(_DIAL_S, left))
            handshakes.dial(end, str(peer))
            return
        except OSError as error:
            left = deadline - time.monotonic()
            if left <= 0 or not isinstance(error, TimeoutError):
                raise _unreached(bootstrap, peer, where, error) from error
        bootstrap.addresses.check()  # each dial asks the machine anew, as TCP does in a longer one


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


def _unreached(bootstrap: Bootstrap, peer: int, where: str, reason: Exception) -> CommError:
    """Return the error of a rank that didn't answer this one's dials."""
    rank = bootstrap.rank
    if isinstance(reason, TimeoutError):
        return _missing(bootstrap, [peer])
    if isinstance(reason, GreetingError):
        return PeerLost(
            f"rank {rank}: the process at {where} is not rank {peer} of this job (authentication "
            "failed)."
        )
    return PeerLost(f"rank {rank} cannot reach rank {peer} at {where}: {reason}; check firewalls.")


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
