"""One peer's connection for frames: what is sent and received on it."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Protocol

from paceline.cluster.membership.control_line.connection import PEER_CLOSED, reason_of
from paceline.cluster.membership.control_line.frames import (
    JSON,
    Frame,
    FrameReader,
    InvalidFrame,
    encode,
)
from paceline.cluster.membership.control_line.line_thread import READ, WRITE, LineThread
from paceline.cluster.membership.control_line.outbox import Outbox

_TURN = 2**20  # bytes that one connection sends before others have their turn
_READ = 2**18


class LinkOwner(Protocol):
    """Protocol of what gets a link's events, on the line's thread."""

    def link_received(self, link: Link, frame: Frame) -> None:
        """Take a frame."""

    def close_link(self, link: Link, reason: str) -> None:
        """Handle the connection's end."""


class Link:
    """Link to one peer: the connection for frames, and the row of that for beats.

    Args:
        connection: the connection for frames, authenticated.
        row: the row of the connection for beats.
        max_bulk: the bulk bytes that are queued, or received in one frame, at most.
        owner: gets the link's events.
    """

    def __init__(
        self,
        peer_name: str,
        thread: LineThread,
        connection: socket.socket,
        row: int,
        max_bulk: int,
        owner: LinkOwner,
    ) -> None:
        self.peer_name = peer_name
        self.connection = connection
        self.row = row
        self.open = True  # written by the line's thread
        self._thread = thread
        self._owner = owner
        self._outbox = Outbox(max_bulk)
        self._reader = FrameReader(max_bulk)
        self._buffer = memoryview(bytearray(_READ))
        self._unsent: list[memoryview] = []
        thread.watch(connection, READ, self._on_ready)

    def send(
        self, kind: str, body: Mapping[str, JSON], bulk: bytes | memoryview | list[memoryview]
    ) -> bool:
        """Queue a frame; return whether there was room. Any thread may call this."""
        views = [memoryview(one) for one in (bulk if isinstance(bulk, list) else [bulk])]
        views = [view.cast("B") for view in views if view.nbytes]
        if views:
            size = sum(view.nbytes for view in views)
            queued, wake = self._outbox.add(encode(kind, body, size), *views)
        else:
            queued, wake = self._outbox.add(encode(kind, body))
        if wake:
            self._thread.post(self._flush)
        return queued

    def has_sent_all(self) -> bool:
        """Return whether the kernel has taken all frames; on the line's thread."""
        return not self._unsent and self._outbox.is_idle()

    def _on_ready(self, events: int) -> None:
        if events & READ:
            self._read()
        if events & WRITE:
            self._flush()

    def _read(self) -> None:
        try:
            size = self.connection.recv_into(self._buffer)
            frames = self._reader.feed(self._buffer[:size])
        except BlockingIOError:
            return
        except OSError as error:
            self._owner.close_link(self, reason_of(error))
            return
        except InvalidFrame as error:
            self._owner.close_link(self, f"it sent bytes that are no frames: {error}")
            return
        for frame in frames:
            if self.open:
                self._owner.link_received(self, frame)
        # After the frames: a peer that closes its connection has sent its reason just before.
        if not size and self.open:
            self._owner.close_link(self, PEER_CLOSED)

    def _flush(self) -> None:
        """Send until the socket is full, nothing is left, or others have their turn."""
        left = _TURN
        try:
            while self.open and left > 0:
                if not self._unsent:
                    self._unsent = [memoryview(part) for part in self._outbox.take()]
                if not self._unsent:
                    # A socket nearly always has room, so to watch
                    # for that with nothing to send would be to spin.
                    self._thread.watch(self.connection, READ, self._on_ready)
                    return
                sent = self.connection.sendmsg(self._unsent)
                left -= sent
                self._unsent = _after(self._unsent, sent)
        except BlockingIOError:
            pass
        except OSError as error:
            self._owner.close_link(self, reason_of(error))
        if self.open:
            self._thread.watch(self.connection, READ | WRITE, self._on_ready)


def _after(parts: list[memoryview], sent: int) -> list[memoryview]:
    """Return what is left of parts of which so many bytes are sent."""
    rest = []
    for part in parts:
        if sent < len(part):
            rest.append(part[sent:])
        sent = max(0, sent - len(part))
    return rest
