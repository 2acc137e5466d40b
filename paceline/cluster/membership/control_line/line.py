"""Control line of one process: an authenticated pair of connections to each peer.

    member a                             member b           peers have names: member ids,
      | frames: votes, reports, parts      |                "supervisor/<machine>"
      |----------------------------------->|
      | beats: one byte each half second   |                of two peers, the one with the
      |----------------------------------->|                smaller name dials the other

Connections outlive generations. A peer is *connected* while it has both connections. The end of one
ends the other, and the dialer connects anew until it forgets the peer.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from paceline.cluster.membership.control_line.beats import Beats
from paceline.cluster.membership.control_line.connection import (
    PEER_CLOSED,
    OpenSockets,
    listen,
    reason_of,
)
from paceline.cluster.membership.control_line.dialer import Dialer
from paceline.cluster.membership.control_line.frames import JSON, Frame
from paceline.cluster.membership.control_line.greeters import Listener
from paceline.cluster.membership.control_line.line_thread import READ, LineThread, Timer
from paceline.cluster.membership.control_line.link import Link
from paceline.comm.forked_children import close_in_children
from paceline.comm.handshake import (
    FRAMES,
    GREETING_S,
    MAX_NAME,
    Greeting,
    Identity,
    ListenerGreeting,
)

# A process that ends says so in its last frames, without which the others take it for lost.
_FLUSH_S = 0.5  # for queued frames, when the line is closed
# The last frames of a member that ends well may arrive after the end of its beats.
_LAST_FRAMES_S = 0.5  # for a peer's last frames, after its connection for beats has ended


class LineHandler(Protocol):
    """Handler of a control line's events; all calls are made on the line's thread.

    An exception of a call ends the line: all its connections are closed.
    """

    def received(self, peer: str, kind: str, body: dict[str, Any], bulk: bytes | bytearray) -> None:
        """Handle a frame. Frames without bulk bytes may overtake those with them."""

    def opened(self, peer: str) -> None:
        """Handle a peer that is connected now."""

    def closed(self, peer: str, reason: str) -> None:
        """Handle the end of a peer's connections; not called for `forget` and `close`."""


class ControlLine:
    """Control line: connections to peers, on which any thread sends frames.

    Args:
        name: this process's name.
        secret: what all members of the run know, and no other process.
        address: the numeric address to listen on.
        handler: handles events.
        beat_seconds: seconds between two beats.
        max_bulk: the bulk bytes of a frame, and of all that wait for one peer, at most.
        tcp_timeout: seconds after which TCP ends a connection whose other machine doesn't answer;
            longer than the silence for which a member is expelled.

    Attributes:
        port: the port on which it listens.
    """

    def __init__(
        self,
        *,
        name: str,
        secret: bytes,
        address: str,
        handler: LineHandler,
        beat_seconds: float = 0.5,
        max_bulk: int = 2**33,
        tcp_timeout: float = 60.0,
    ) -> None:
        assert 0 < len(name.encode()) <= MAX_NAME
        assert secret
        self.name = name
        self._me = Identity(name=name, secret=secret)
        self._handler = handler
        self._max_bulk = max_bulk
        self._sockets = OpenSockets(tcp_timeout)
        server = listen(address)
        self._sockets.add(server)
        self.port: int = server.getsockname()[1]
        self._changed = threading.Condition()  # guards `_links`, which the line's thread changes
        self._links: dict[str, Link] = {}
        self._closed = False
        # What follows is used on the line's thread only.
        self._dialers: dict[str, Dialer] = {}
        self._accepted: dict[str, tuple[socket.socket, bytes, Timer]] = {}  # still without beats
        self._forgotten: set[str] = set()
        self._beats = Beats(beat_seconds)
        self._thread = LineThread(self)
        self._thread.watch(self._beats.event, READ, self._on_beats)
        self._listener = Listener(self._thread, self._sockets, server, self)
        close_in_children(self, ControlLine.close_inherited)
        self._thread.start()

    def expect(self, peer: str, address: str, port: int, *, dial: bool | None = None) -> None:
        """Connect with a peer, now and whenever its connections have ended.

        Args:
            address: the numeric address on which it listens.
            dial: whether this side dials; by default, if its name is the smaller one.
        """
        if peer != self.name and (self.name < peer if dial is None else dial):
            self.post(partial(self._dial, peer, (address, port)))

    def connected(self) -> frozenset[str]:
        """Return the names of the connected peers."""
        with self._changed:
            return frozenset(self._links)

    def wait_connected(self, peers: Iterable[str], timeout: float) -> frozenset[str]:
        """Wait until peers are connected; return those that are not after `timeout` seconds."""
        wanted = frozenset(peers) - {self.name}
        with self._changed:
            self._changed.wait_for(lambda: self._closed or wanted <= self._links.keys(), timeout)
            return wanted - self._links.keys()

    def send(
        self,
        peer: str,
        kind: str,
        body: Mapping[str, JSON],
        bulk: bytes | memoryview | list[memoryview] = b"",
    ) -> bool:
        """Queue a frame for a peer, from any thread, without waiting.

        Args:
            kind: what the frame is about; at most 255 bytes.
            body: its JSON object.
            bulk: bytes, or views of them, that follow in chunks, between other frames; they are not
                copied, and don't change until the peer has confirmed them.

        Returns:
            False if the peer is not connected, or its queue is full.
        """
        with self._changed:
            link = self._links.get(peer)
            if self._closed or not link:
                return False
        return link.send(kind, body, bulk)

    def broadcast(
        self, kind: str, body: Mapping[str, JSON], peers: Iterable[str] | None = None
    ) -> None:
        """Queue a frame for several peers; by default, for all that are connected."""
        for peer in self.connected() if peers is None else peers:
            self.send(peer, kind, body)

    def post(self, function: Callable[[], None]) -> None:
        """Run a function on the line's thread."""
        self._thread.post(function)

    def call_later(self, seconds: float, function: Callable[[], None]) -> Timer:
        """Run a function on the line's thread after some seconds; return its timer."""
        return self._thread.call_later(seconds, function)

    def last_beat(self, peer: str) -> float:
        """Return the moment of a peer's last beat by `time.monotonic`; -inf if not connected."""
        with self._changed:
            link = self._links.get(peer)
            return self._beats.last(link.row) if link else float("-inf")

    def silence(self, peer: str) -> float:
        """Return for how many seconds no beat of a peer has arrived; inf if not connected.

        Only time in which this process ran counts: after a pause of its own, it knows nothing of
        the peers until their next beats are due.
        """
        with self._changed:
            link = self._links.get(peer)
            return self._beats.silence(link.row) if link else float("inf")

    def carry(self, number: int) -> None:
        """Let the beats to all peers carry a number, 0 to 255; from any thread."""
        self._beats.carry(number)

    def carried(self, peer: str) -> int | None:
        """Return the number that a peer's last beat carries; None if it is not connected."""
        with self._changed:
            link = self._links.get(peer)
            return self._beats.carried(link.row) if link else None

    def forget(self, peer: str) -> None:
        """Close a peer's connections, and refuse later ones of that name."""
        self.post(partial(self._forget, peer))

    def close(self) -> None:
        """Close all connections; what is queued is sent if that takes a moment only."""
        with self._changed:
            closing = not self._closed
            self._closed = True
            self._changed.notify_all()
        if closing:
            self.post(partial(self._stop, time.monotonic() + _FLUSH_S))
        self._thread.join()

    def close_inherited(self) -> None:
        """Close the descriptors that a forked child has inherited; take no lock, send nothing."""
        self._closed = True
        self._links = {}
        self._sockets.close_all()
        self._beats.close_descriptors()
        self._thread.close_in_child()

    # Calls of its parts, on the line's thread.

    def greeting(self) -> Greeting:
        """Make the greeting of a connection that a peer has dialed."""
        return ListenerGreeting(self._me, self)

    def accepts(self, greeting: Greeting) -> bool:
        """Return whether the connection of a peer that has dialed is wanted."""
        peer = greeting.peer
        # Of two peers one dials, so that they have one
        # link: no peer that this side dials may dial it.
        if peer in self._forgotten or peer in self._dialers or peer == self.name:
            return False
        accepted = self._accepted.get(peer)
        return greeting.kind == FRAMES or (accepted is not None and accepted[1] == greeting.session)

    def authenticated(self, connection: socket.socket, greeting: Greeting) -> None:
        """Take a connection of a peer that dialed: that for frames, or that for beats after it."""
        peer = greeting.peer
        if greeting.kind != FRAMES:
            frames, _, timer = self._accepted.pop(peer)
            timer.cancel()
            self.open_link(peer, frames, connection)
            return
        self._drop_accepted(peer)
        timer = self.call_later(GREETING_S, partial(self._drop_accepted, peer))
        self._accepted[peer] = connection, greeting.session, timer
        if peer in self._links:
            self.close_link(self._links[peer], "it connected anew")

    def open_link(self, peer: str, frames: socket.socket, beats: socket.socket) -> None:
        """Take the connections to a peer, which this side dialed or the peer."""
        row = self._beats.add(self._sockets.hand_over(beats))
        link = Link(peer, self._thread, frames, row, self._max_bulk, self)
        with self._changed:
            self._links[peer] = link
            self._changed.notify_all()
        self._handler.opened(peer)

    def close_link(self, link: Link, reason: str, *, report: bool = True) -> None:
        """Close a peer's connections, if they are open: one of them has ended, say."""
        if not link.open:
            return
        peer = link.peer_name
        with self._changed:
            del self._links[peer]
        link.open = False
        self._thread.unwatch(link.connection)
        with suppress(OSError):
            link.connection.shutdown(socket.SHUT_RDWR)
        self._sockets.close(link.connection)
        self._beats.remove(link.row)
        if report:
            self._handler.closed(peer, reason)
        if peer in self._dialers:
            self._dialers[peer].redial()

    def link_received(self, link: Link, frame: Frame) -> None:
        """Pass a frame on to the handler."""
        self._handler.received(link.peer_name, frame.kind, frame.body, frame.bulk)

    def thread_ended(self) -> None:
        """Close everything."""
        with self._changed:
            self._closed = True
            links = list(self._links.values())
            self._links.clear()
            self._changed.notify_all()
        for link in links:
            link.open = False
            with suppress(OSError):
                link.connection.shutdown(socket.SHUT_RDWR)
        self._sockets.close_all()
        self._beats.close()

    def _dial(self, peer: str, where: tuple[str, int]) -> None:
        if peer in self._forgotten or self._closed:
            return
        if (old := self._dialers.pop(peer, None)) is not None:
            old.close()
        self._dialers[peer] = Dialer(self._thread, self._sockets, where, self._me, peer, self)
        if peer not in self._links:
            self._dialers[peer].dial()

    def _drop_accepted(self, peer: str) -> None:
        if peer in self._accepted:
            connection, _, timer = self._accepted.pop(peer)
            timer.cancel()
            self._sockets.close(connection)

    def _on_beats(self, _: int) -> None:
        """Close, in a moment, the peers whose connection for beats has ended.

        Usually that for frames ends, too, after its last frames have arrived.
        """
        for row, error in self._beats.ended():
            reason = PEER_CLOSED if error < 0 else reason_of(OSError(error, ""))
            for link in [link for link in self._links.values() if link.row == row]:
                self.call_later(_LAST_FRAMES_S, partial(self.close_link, link, reason))

    def _forget(self, peer: str) -> None:
        self._forgotten.add(peer)
        if peer in self._dialers:
            self._dialers.pop(peer).close()
        self._drop_accepted(peer)
        # The dialer knows before this side that the old
        # connections are dead, where a cut link hides it.
        if peer in self._links:
            self.close_link(self._links[peer], "", report=False)

    def _stop(self, deadline: float) -> None:
        """Stop the thread once everything queued is sent, or at the deadline."""
        busy = any(not link.has_sent_all() for link in self._links.values())
        if busy and time.monotonic() < deadline:
            self.call_later(0.01, partial(self._stop, deadline))
        else:
            self._thread.stop()
