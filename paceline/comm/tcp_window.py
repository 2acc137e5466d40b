"""A window over TCP, between machines.

The kernel's buffer is first in, first out, so it is kept short (`TCP_NOTSENT_LOWAT`): what hasn't
left it can still be overtaken by something more urgent.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable

import torch

from paceline.comm.linked_window import LinkedWindow
from paceline.comm.mesh import Meeting, connect_all

_UNSENT = 2**18  # bytes that wait in the kernel at most
_IN_FLIGHT = 2**17  # bytes that have left for each of several peers
_NOTSENT_LOWAT = 25  # https://man7.org/linux/man-pages/man7/tcp.7.html; not in Python's socket


def tcp_window(meeting: Meeting, address: str, size: int, notifications: int) -> LinkedWindow:
    """Connect ranks by TCP; collective.

    Args:
        meeting: who connects.
        address: the IP address of this machine that the peers reach.
        size: bytes of this rank's memory.
        notifications: how many each peer has.

    Raises:
        CommError: a rank didn't come in time, or can't be reached.
    """
    ends = connect_by_tcp(meeting, address)
    memory = torch.zeros(size, dtype=torch.uint8)
    return LinkedWindow(meeting.rank, memory, ends, [None] * len(ends), notifications)


def connect_by_tcp(meeting: Meeting, address: str) -> list[socket.socket | None]:
    """Connect ranks by TCP, ready for puts; collective. As `connect_all`."""
    with socket.create_server((address, 0), family=_family(address)) as server:
        where = f"{address} {server.getsockname()[1]}"
        ends = connect_all(meeting, server, where, _call)
    tune(ends)
    return ends


def tune(ends: Iterable[socket.socket | None]) -> None:
    """Set TCP connections up for puts.

    Several connections share a link by what each has in flight: with equal and short buffers none
    falls behind, and what is urgent isn't stuck behind what was sent before.
    """
    connected = [end for end in ends if end is not None]
    for end in connected:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(connected) > 1:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _IN_FLIGHT)
        end.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, _UNSENT)


def _call(where: str, limit: float) -> socket.socket:
    host, port = where.split()
    return socket.create_connection((host, int(port)), limit)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
