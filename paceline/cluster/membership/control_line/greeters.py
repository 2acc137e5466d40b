"""Connections whose greeting has not ended: few, and each for a few seconds only."""

from __future__ import annotations

import socket
from typing import Protocol

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


class GreeterOwner(Protocol):
    """Protocol of what gets the outcome of a greeting."""

    def greeted(self, greeter: Greeter, connection: socket.socket | None) -> None:
        """Take the connection after its greeting; None: there was none, and it is closed.

        Called once, on the line's thread.
        """


class ListenerOwner(Protocol):
    """Protocol of what gets a listener's connections; called on the line's thread."""

    def greeting(self) -> Greeting:
        """Make this side's greeting of a connection."""

    def authenticated(self, connection: socket.socket, greeting: Greeting) -> None:
        """Take a connection after its greeting."""


class Greeter:
    """Connection whose greeting is under way.

    Args:
        sockets: the line's open sockets.
        connection: a connection that is open or, for a dialer, being made.
        greeting: this side's greeting.
        owner: gets the outcome.
    """

    def __init__(
        self,
        thread: LineThread,
        sockets: OpenSockets,
        connection: socket.socket,
        greeting: Greeting,
        owner: GreeterOwner,
    ) -> None:
        self.greeting = greeting
        self._thread = thread
        self._sockets = sockets
        self._connection = connection
        self._owner = owner
        self._timer = thread.call_later(GREETING_S, self.fail)
        if isinstance(greeting, DialerGreeting):
            thread.watch(connection, WRITE, self._on_connected)
        else:
            thread.watch(connection, READ, self._on_readable)

    def fail(self) -> None:
        """Close the connection."""
        self._leave_thread()
        self._sockets.close(self._connection)
        self._owner.greeted(self, None)

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
            self._owner.greeted(self, self._connection)

    def _leave_thread(self) -> None:
        self._timer.cancel()
        self._thread.unwatch(self._connection)


class Listener:
    """Listener: takes connections from the listening socket and greets the dialers.

    Of too many, the oldest of the address that has the most is closed.

    Args:
        sockets: the line's open sockets.
        server: the listening socket.
        owner: makes the greetings, and gets the connections.
    """

    def __init__(
        self,
        thread: LineThread,
        sockets: OpenSockets,
        server: socket.socket,
        owner: ListenerOwner,
    ) -> None:
        self._thread = thread
        self._sockets = sockets
        self._server = server
        self._owner = owner
        self._greeters: dict[Greeter, str] = {}  # in order of age, with the dialers' addresses
        thread.watch(server, READ, self._accept)

    def __len__(self) -> int:
        """Count the unauthenticated connections."""
        return len(self._greeters)

    def greeted(self, greeter: Greeter, connection: socket.socket | None) -> None:
        """Pass a connection on after its greeting."""
        del self._greeters[greeter]
        if connection is not None:
            self._owner.authenticated(connection, greeter.greeting)

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
            self._sockets.add_connection(connection)
            greeting = self._owner.greeting()
            greeter = Greeter(self._thread, self._sockets, connection, greeting, self)
            self._greeters[greeter] = address
            if len(self._greeters) > MAX_UNAUTHENTICATED:
                first_to_drop(self._greeters).fail()

    def _resume(self) -> None:
        self._thread.watch(self._server, READ, self._accept)
