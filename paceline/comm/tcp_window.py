"""A window over TCP, between machines.

The kernel's buffer is first in, first out, so it is kept short (`TCP_NOTSENT_LOWAT`): what hasn't
left it can still be overtaken by something more urgent.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from math import inf

import torch

from paceline.comm.connection_window import ConnectionWindow
from paceline.comm.transport.bootstrap import Bootstrap, connect_all

_UNSENT = 2**18  # bytes that wait in the kernel at most
_IN_FLIGHT_ALONE, _IN_FLIGHT_OF_SEVERAL = 2**18, 2**17  # bytes; the kernel grants twice as many
_FAST = 1.25e9  # bytes/s: 10 Gbit/s
# https://man7.org/linux/man-pages/man7/tcp.7.html and linux/tcp.h; not in Python's socket.
_NOTSENT_LOWAT, _MIN_RTT = 25, struct.Struct("=148xI")


def tcp_window(
    bootstrap: Bootstrap, address: str, size: int, notifications: int, connections: int = 1
) -> ConnectionWindow:
    """Connect ranks by TCP; collective.

    Args:
        bootstrap: who connects.
        address: the IP address of this machine that the peers reach.
        size: bytes of this rank's memory.
        notifications: how many each peer has.
        connections: to each peer.

    Raises:
        CommError: a rank didn't come in time, or can't be reached.
    """
    ends = connect_by_tcp(bootstrap, address, connections)
    memory = torch.zeros(size, dtype=torch.uint8)
    return ConnectionWindow(bootstrap.rank, memory, ends, [None] * len(ends), notifications)


def connect_by_tcp(
    bootstrap: Bootstrap, address: str, connections: int = 1
) -> list[list[socket.socket]]:
    """Connect ranks by TCP, ready for puts; collective.

    Returns:
        each rank's streams, in the same order at both ends; of this rank, none.

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
    with socket.create_server((address, 0), family=_family(address)) as server:
        where = f"{address} {server.getsockname()[1]}"
        return connect_all(replace(bootstrap, purpose=purpose), server, where, _call)


def tune(streams: Iterable[Sequence[socket.socket]]) -> None:
    """Set the TCP connections to all peers up for puts."""
    ends = list(chain.from_iterable(streams))
    for end in ends:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, _UNSENT)
        info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT.size)
        if few := in_flight(round_trip(info), len(ends)):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, few)


def in_flight(round_trip: float, connections: int) -> int | None:
    """Return how many bytes may have left by each of some connections; None: as many as TCP likes.

    TCP sends until a queue on the way is full, and what is urgent stands behind all that was sent
    before. Between near machines a link is busy with a fraction of that. Connections that share a
    link share it by what each has in flight: with equal and short buffers none falls behind.

    Args:
        round_trip: seconds, with empty queues.
        connections: of this rank.
    """
    few = _IN_FLIGHT_ALONE if connections == 1 else _IN_FLIGHT_OF_SEVERAL
    return few if round_trip * _FAST <= 2 * few * connections else None


def round_trip(info: bytes) -> float:
    """Return the shortest time that TCP has seen a byte take to the peer and back, seconds.

    Args:
        info: a `tcp_info`; one that is too short, or has 0 there, is of a kernel that doesn't tell.
    """
    told = _MIN_RTT.unpack(info)[0] if len(info) == _MIN_RTT.size else 0
    return float(told) / 1e6 if told else inf


def _call(where: str, limit: float) -> socket.socket:
    host, port = where.split()
    return socket.create_connection((host, int(port)), limit)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
