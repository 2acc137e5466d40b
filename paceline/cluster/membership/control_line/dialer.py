"""Dialer: makes the two connections to one peer, and makes them anew when they have ended."""

from __future__ import annotations

import socket
from typing import Protocol

from paceline.cluster.jitter import jitter
from paceline.cluster.membership.control_line.connection import OpenSockets
from paceline.cluster.membership.control_line.greeters import Greeter
from paceline.cluster.membership.control_line.line_thread import LineThread, Timer
from paceline.comm.addresses import family_of
from paceline.comm.handshake import BEATS, FRAMES, NO_SESSION, DialerGreeting, Identity

_FIRST_S = 0.05  # between two attempts, at first
# A link that comes back within the peer timeout must be used again before that ends.
_LONGEST_S = 2.0  # and at most


class DialerOwner(Protocol):
    """Protocol of what gets a dialer's connections."""

    def open_link(self, peer: str, frames: socket.socket, beats: socket.socket) -> None:
        """Take both connections to a peer, on the line's thread."""


class Dialer:
    """Dialer of one peer. All methods are called on the line's thread.

    Args:
        sockets: the line's open sockets.
        where: the peer's address and port.
        identity: this process's.
        owner: gets the connections.
    """

    def __init__(
        self,
        thread: LineThread,
        sockets: OpenSockets,
        where: tuple[str, int],
        identity: Identity,
        peer: str,
        owner: DialerOwner,
    ) -> None:
        self._thread = thread
        self._sockets = sockets
        self._where = where
        self._identity = identity
        self._peer = peer
        self._owner = owner
        self._frames: socket.socket | None = None  # authenticated, while that for beats is made
        self._greeter: Greeter | None = None
        self._timer: Timer | None = None
        self._pause = _FIRST_S
        self._closed = False

    def dial(self) -> None:
        """Connect now."""
        self._dial(FRAMES, NO_SESSION)

    def redial(self) -> None:
        """Connect again, after a pause that grows from one attempt to the next."""
        if self._closed:
            return
        self._timer = self._thread.call_later(self._pause * jitter(0.5, 1.5), self.dial)
        self._pause = min(2 * self._pause, _LONGEST_S)

    def close(self) -> None:
        """Make no more connections."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._greeter is not None:
            self._greeter.fail()
        self._drop_frames()

    def greeted(self, greeter: Greeter, connection: socket.socket | None) -> None:
        """Take a connection after its greeting, and make that for beats after that for frames."""
        self._greeter = None
        if connection is None:
            self._fail()
        elif greeter.greeting.kind == FRAMES:
            self._frames = connection
            self._dial(BEATS, greeter.greeting.session)
        else:
            frames = self._frames
            self._frames = None
            assert frames is not None
            self._pause = _FIRST_S
            self._owner.open_link(self._peer, frames, connection)

    def _dial(self, kind: bytes, session: bytes) -> None:
        address = self._where[0]
        try:
            connection = socket.socket(family_of(address), socket.SOCK_STREAM)
        except OSError:  # no descriptor is free
            self._fail()
            return
        self._sockets.add_connection(connection)
        try:
            # Without waiting: the greeter learns whether it
            # has connected once the socket can be written.
            connection.connect(self._where)
        except BlockingIOError:
            pass
        except OSError:
            self._sockets.close(connection)
            self._fail()
            return
        greeting = DialerGreeting(self._identity, self._peer, kind, session)
        self._greeter = Greeter(self._thread, self._sockets, connection, greeting, self)

    def _fail(self) -> None:
        self._drop_frames()
        self.redial()

    def _drop_frames(self) -> None:
        frames = self._frames
        self._frames = None
        if frames is not None:
            self._sockets.close(frames)
