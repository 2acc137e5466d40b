"""Sockets of the control line: their options, their reasons for an end, and all that are open."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

from paceline.comm.addresses import family_of

PEER_CLOSED = "it closed the connection"
_UNSENT = 2**18  # bytes that wait in the kernel at most, so that small frames overtake bulk bytes
_BACKLOG = 128
# https://man7.org/linux/man-pages/man7/tcp.7.html and linux/tcp.h; not in Python's socket.
_NOTSENT_LOWAT = 25
_RTO_MAX_MS = 44


class OpenSockets:
    """Open sockets of one control line, which a forked child closes.

    Args:
        tcp_timeout: seconds after which TCP ends a connection whose other machine doesn't answer.
    """

    def __init__(self, tcp_timeout: float) -> None:
        self._tcp_timeout = tcp_timeout
        self._sockets: set[socket.socket] = set()

    def add(self, made: socket.socket) -> socket.socket:
        """Include a socket."""
        self._sockets.add(made)
        return made

    def add_connection(self, made: socket.socket) -> None:
        """Include a connection, and set its options."""
        self.add(made)
        tune(made, self._tcp_timeout)

    def close(self, used: socket.socket) -> None:
        """Close a socket."""
        self._sockets.discard(used)
        used.close()

    def hand_over(self, used: socket.socket) -> socket.socket:
        """Exclude a socket, which another owner closes."""
        self._sockets.discard(used)
        return used

    def close_all(self) -> None:
        """Close all sockets."""
        for used in list(self._sockets):
            self.close(used)


def listen(address: str) -> socket.socket:
    """Listen on an address, at a port that the system chooses."""
    server = socket.create_server((address, 0), family=family_of(address), backlog=_BACKLOG)
    server.setblocking(False)
    return server


def tune(connection: socket.socket, timeout: float) -> None:
    """Set a connection's options.

    Args:
        connection: a TCP connection.
        timeout: seconds after which TCP ends it if the other machine doesn't answer.
    """
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    tcp = {
        socket.TCP_NODELAY: 1,
        _NOTSENT_LOWAT: _UNSENT,
        # The kernel ends a connection whose other machine is gone, with or without bytes under way:
        # the user timeout counts unacknowledged bytes, keepalive probes an idle connection.
        socket.TCP_KEEPIDLE: max(1, round(timeout / 2)),
        socket.TCP_KEEPINTVL: max(1, round(timeout / 8)),
        socket.TCP_KEEPCNT: 4,
        socket.TCP_USER_TIMEOUT: round(1000 * timeout),
    }
    for option, value in tcp.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    # While a link is cut, TCP doubles its pause up to two minutes, and finds it again as late.
    with suppress(OSError):  # Linux 6.15: a link that was cut is used again within a second
        connection.setsockopt(socket.IPPROTO_TCP, _RTO_MAX_MS, 1000)


def reason_of(error: OSError) -> str:
    """Describe an error of a connection."""
    return os.strerror(error.errno) if error.errno else str(error)
