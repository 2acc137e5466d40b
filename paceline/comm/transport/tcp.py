"""TCP connections between machines, tuned for puts.

The kernel's send buffer is first in, first out, so it stays short (`TCP_NOTSENT_LOWAT`): a more
urgent put can overtake what has not entered it.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from math import inf

from paceline.comm.addresses import family_of
from paceline.comm.transport.bootstrap import Bootstrap, connect_all

_UNSENT = 2**18  # bytes that wait in the kernel at most
# Bytes; the kernel grants twice as many.
# On a link of 2.5 Gbit/s TCP filled its queue with 3 MB, behind which an urgent put waited 10 ms.
_IN_FLIGHT_ALONE = 2**18
_IN_FLIGHT_OF_SEVERAL = 2**17
# A path whose product of speed and delay is larger needs
# a longer queue to be filled: TCP knows better there.
_FAST = 1.25e9  # bytes/s: 10 Gbit/s
# https://man7.org/linux/man-pages/man7/tcp.7.html and linux/tcp.h; not in Python's socket.
_NOTSENT_LOWAT = 25
_MIN_RTT = struct.Struct("=148xI")


def connect_by_tcp(
    bootstrap: Bootstrap, address: str, connections: int = 1
) -> list[list[socket.socket]]:
    """Connect ranks by TCP, ready for puts; collective.

    Returns:
        each rank's streams, in the same order at both ends; none of this rank.

    Raises:
        as `connect_all`.
    """
    streams: list[list[socket.socket]] = [[] for _ in range(bootstrap.world_size)]
    with ExitStack() as stack:
        for number in range(connections):
            for peer, end in enumerate(_connect(bootstrap, address, number)):
                if end is not None:
                    stack.callback(end.close)
                    streams[peer].append(end)
        stack.pop_all()
    tune(streams)
    return streams


def _connect(bootstrap: Bootstrap, address: str, number: int) -> list[socket.socket | None]:
    """Make one connection to each peer."""
    purpose = f"{bootstrap.purpose}/{number}" if number else bootstrap.purpose
    with socket.create_server((address, 0), family=family_of(address)) as server:
        where = f"{address} {server.getsockname()[1]}"
        return connect_all(replace(bootstrap, purpose=purpose), server, where, _call)


def tune(streams: Iterable[Sequence[socket.socket]]) -> None:
    """Set the options of the TCP connections to all peers."""
    ends = list(chain.from_iterable(streams))
    for end in ends:
        # A notification is a few bytes, for which Nagle's algorithm would wait.
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, _UNSENT)
        info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT.size)
        if few := in_flight(round_trip(info), len(ends)):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, few)


def probe_silent_peers(streams: Iterable[Sequence[socket.socket]], limit: float) -> None:
    """Let TCP end connections whose other machine doesn't answer for about `limit` seconds."""
    idle = max(1, round(limit / 2))
    every = max(1, round(limit / 8))
    for end in chain.from_iterable(streams):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * limit))


def in_flight(round_trip: float, connections: int) -> int | None:
    """Return the bytes that each connection may have in flight; None: TCP decides.

    TCP sends until a queue on the way is full, and an urgent put waits behind all that was sent
    before. Over a short round trip a fraction of that keeps the link busy. Connections share a link
    in proportion to what each has in flight: with equal and short buffers none falls behind.

    Args:
        round_trip: seconds, with empty queues.
        connections: of this rank.
    """
    few = _IN_FLIGHT_ALONE if connections == 1 else _IN_FLIGHT_OF_SEVERAL
    return few if round_trip * _FAST <= 2 * few * connections else None


def round_trip(info: bytes) -> float:
    """Return the shortest round trip that TCP has measured, in seconds.

    Args:
        info: a `tcp_info`; too short, or 0 in this field, where the kernel does not report it.
    """
    microseconds = _MIN_RTT.unpack(info)[0] if len(info) == _MIN_RTT.size else 0
    return microseconds / 1e6 if microseconds else inf


def _call(where: str, limit: float) -> socket.socket:
    host, port = where.split()
    return socket.create_connection((host, int(port)), limit)
