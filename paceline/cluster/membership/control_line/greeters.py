"""Connections whose greeting has not ended: few, and each for a few seconds only."""

from __future__ import annotations

import socket
from collections.abc import Callable

from paceline.cluster.membership.control_line.connection import OpenSockets
from paceline.cluster.membership.control_line.line_thread import READ, WRITE, LineThread
from paceline.comm.handshake import (
    GREETING_S,
    MAX_UNAUTHENTICATED,
    DialerGreeting,
    Greeting,
    GreetingError,
    advance,
    first_to_drop,
)

# In one turn of the thread, which votes and heartbeats' evidence share: a flood must not hold it.
_ACCEPTED_AT_ONCE = 16
_NO_DESCRIPTORS_S = 1.0  # without accepting, after the process ran out of descriptors


class Greeter:
    """Connection whose greeting is under way.

    Args:
        thread: the line's thread.
        sockets: the line's open sockets.
        connection: a connection that is open or, for a dialer, being made.
        greeting: this side's greeting.
        ended: called once, on the line's thread: with the connection after the greeting; with None
            if there was none, after the connection is closed.
    """

    def __init__(
        self,
        thread: LineThread,
        sockets: OpenSockets,
        connection: socket.socket,
        greeting: Greeting,
        ended: Callable[[Greeter, socket.socket | None], None],
    ) -> None:
        self.greeting = greeting
        self._thread = thread
        self._sockets = sockets
        self._connection = connection
        self._ended = ended
        self._timer = thread.call_later(GREETING_S, self.fail)
        if isinstance(greeting, DialerGreeting):
            thread.watch(connection, WRITE, self._on_connected)
        else:
            thread.watch(connection, READ, self._on_readable)

    def fail(self) -> None:
        """Close the connection."""
        self._leave_thread()
        self._sockets.close(self._connection)
        self._ended(self, None)

    def _on_connected(self, _: int) -> None:
        assert isinstance(self.greeting, DialerGreeting)
        self._thread.watch(self._connection, READ, self._on_readable)
        try:
            self._connection.sendall(self.greeting.hello)  # for which a new connection has room
        except OSError:
            self.fail()

    def _on_readable(self, _: int) -> None:
        try:
            ended = advance(self._connection, self.greeting)
        except (GreetingError, OSError):
            self.fail()
            return
        if ended:
            self._leave_thread()
            self._ended(self, self._connection)

    def _leave_thread(self) -> None:
        self._timer.cancel()
        self._thread.unwatch(self._connection)


class Listener:
    """Listener: takes connections from the listening socket and greets the dialers.

    Of too many, the oldest of the address that has the most is closed.

    Args:
        thread: the line's thread.
        sockets: the line's open sockets.
        server: the listening socket.
        prepare: sets a connection's options.
        greeting: makes this side's greeting of a connection.
        authenticated: called with a connection and its greeting, on the line's thread.
    """

    def __init__(
        self,
        thread: LineThread,
        sockets: OpenSockets,
        server: socket.socket,
        prepare: Callable[[socket.socket], None],
        greeting: Callable[[], Greeting],
        authenticated: Callable[[socket.socket, Greeting], None],
    ) -> None:
        self._thread = thread
        self._sockets = sockets
        self._server = server
        self._prepare = prepare
        self._greeting = greeting
        self._authenticated = authenticated
        self._greeters: dict[Greeter, str] = {}  # in order of age, with the dialers' addresses
        thread.watch(server, READ, self._accept)

    def __len__(self) -> int:
        """Count the unauthenticated connections."""
        return len(self._greeters)

    def _accept(self, _: int = READ) -> None:
        for _turn in range(_ACCEPTED_AT_ONCE):
            try:
                connection, (address, *_rest) = self._server.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError:
                # Without descriptors the socket stays ready, and the thread would spin.
                self._thread.unwatch(self._server)
                self._thread.call_later(_NO_DESCRIPTORS_S, self._resume)
                return
            self._sockets.add(connection)
            self._prepare(connection)
            greeter = Greeter(
                self._thread, self._sockets, connection, self._greeting(), self._ended
            )
            self._greeters[greeter] = address
            if len(self._greeters) > MAX_UNAUTHENTICATED:
                first_to_drop(self._greeters).fail()

    def _resume(self) -> None:
        self._thread.watch(self._server, READ, self._accept)

    def _ended(self, greeter: Greeter, connection: socket.socket | None) -> None:
        del self._greeters[greeter]
        if connection is not None:
            self._authenticated(connection, greeter.greeting)
