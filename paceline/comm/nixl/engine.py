"""Transport thread of a NIXL window: hands puts to NIXL in pieces, and notifies of arrivals.

Beside NIXL's own connection to each peer there is a control connection over TCP, whose greeting
carried the job's token (the *line* of a peer). It carries two kinds of bytes:

    PROMISE   a put to you begins: the peer polls NIXL until it has arrived
    ARRIVED   a put of yours has arrived: a closing window waits for these for a moment

Between puts all threads sleep in the kernel, on their lines; NIXL itself can only be polled. A peer
whose line ends is lost.
"""

from __future__ import annotations

import heapq
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.comm.forked_children import close_in_children
from paceline.comm.nixl.agent import NixlAgent
from paceline.comm.window import INVALID_PUT, PEER_CLOSED, THIS_PROCESS_CLOSED

PIECE = 2**22  # bytes that are sent before a more urgent put can be
PROMISE = b"p"
ARRIVED = b"a"
_MESSAGE = struct.Struct("!Iq")  # notification, value
_PAUSES_S = 5e-5, 1e-3  # between two looks into NIXL while something is under way: grows
_IDLE_MS = 500
_CLOSE_S = 5.0
_WAIT_SLICE_S = 1.0  # for promised puts after a line ended, and for unconfirmed ones at the end


@dataclass(order=True)
class Put:
    """Put in progress: `left` holds address and size of each range not yet handed to NIXL."""

    priority: int
    number: int
    peer: int = field(compare=False)
    sources: list[Tensor] = field(compare=False)
    offset: int = field(compare=False)
    message: bytes = field(compare=False)
    left: deque[tuple[int, int]] = field(compare=False, default_factory=deque)
    begun: bool = field(compare=False, default=False)

    def cut(self, limit: int) -> list[tuple[int, int]]:
        """Take at most `limit` bytes off what is left."""
        pieces = []
        while self.left and limit:
            address, size = self.left.popleft()
            if size > limit:
                self.left.appendleft((address + limit, size - limit))
                size = limit
            pieces.append((address, size))
            limit -= size
        return pieces


@dataclass
class Peer:
    """Connection state of one peer: control connection, NIXL name and put counts.

    Attributes:
        name: the NIXL name of the peer.
        memory: the address of the peer's memory in the peer's process.
        puts: a heap of waiting puts; `put` is the one in progress, and `transfer` its current NIXL
            transfer.
        promised: number of puts from the peer that have begun.
        came: number of puts from the peer that have arrived here.
        finished: number of puts to the peer that have been sent.
        confirmed: number of puts to the peer whose arrival the peer has confirmed.
        owed: bytes still to be sent on the control connection (`line`).
        ended_at: when the control connection ended, in seconds; None while it is open.
        error: why the peer was lost; "" while it is connected.
    """

    line: socket.socket
    name: str
    memory: int
    puts: list[Put] = field(default_factory=list)
    put: Put | None = None
    transfer: Any = None
    under_way: int = 0
    promised: int = 0
    came: int = 0
    finished: int = 0
    confirmed: int = 0
    owed: bytes = b""
    ended_at: float | None = None
    error: str = ""

    @property
    def expects(self) -> bool:
        """Whether NIXL has something to do for this peer."""
        moving = self.put is not None or bool(self.puts) or self.came < self.promised
        return not self.error and (moving or bool(self.owed))

    @property
    def unconfirmed(self) -> bool:
        """Whether something was sent that the peer has not confirmed."""
        return not self.error and self.ended_at is None and self.confirmed < self.finished

    def drained(self, now: float) -> bool:
        """Return, for a peer whose line has ended, whether all that can arrive has arrived."""
        assert self.ended_at is not None
        return self.came >= self.promised or now > self.ended_at + _WAIT_SLICE_S


class NixlEngine:
    """Transport thread for puts over NIXL.

    Args:
        agent: this process's NIXL agent, with which this rank's memory is registered.
        peers: the peers, by rank; None for this rank.
        values: (world_size, notifications), the last value of each notification; written when a
            put has arrived.

    Attributes:
        changed: condition that is notified when `values`, `events` or a peer's error changes.
        events: number of subscribed notifications that arrived, plus the number of calls of the
            window's `wake`.
        subscribed: bound of the subscription: notifications with lower numbers are subscribed.
    """

    def __init__(
        self, agent: NixlAgent, peers: Sequence[Peer | None], values: NDArray[np.int64]
    ) -> None:
        self.changed = threading.Condition()
        self.events = 0
        self.subscribed = values.shape[1]
        self.peers = peers
        self._agent = agent
        self._values = values
        self._there = [(rank, peer) for rank, peer in enumerate(peers) if peer is not None]
        self._rank_of = {peer.name: rank for rank, peer in self._there}
        self._inbox: deque[Put] = deque()
        self._number = 0
        self._closing = False
        self._pause = _PAUSES_S[0]
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._lines = {peer.line.fileno(): peer for _, peer in self._there}
        for number, peer in self._lines.items():
            peer.line.setblocking(False)
            self._poll.register(number, select.POLLIN)
        close_in_children(self, _close_lines)
        self._thread = threading.Thread(target=self._run, name="nixl window", daemon=True)
        self._thread.start()

    def put(
        self, rank: int, sources: list[Tensor], offset: int, target: tuple[int, int], priority: int
    ) -> None:
        """Queue a put of (bytes,) of uint8 each, for (notification, value); not while it closes."""
        peer = self._peer(rank)
        with self.changed:
            if self._closing:
                return
            self._number += 1
            message = _MESSAGE.pack(*target)
            self._inbox.append(Put(priority, self._number, rank, sources, offset, message))
            peer.under_way += 1
            os.eventfd_write(self._wake, 1)

    def interrupt(self) -> None:
        """Lose all peers, from any thread: the engine's thread sees the ends of their lines."""
        with self.changed:
            for _, peer in self._there:
                with suppress(OSError):  # closed
                    peer.line.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Drop what has not been sent, and end; every waiting thread wakes."""
        with self.changed:
            if self._closing:
                return
            self._closing = True
            os.eventfd_write(self._wake, 1)
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():  # otherwise it may still read the descriptor
            os.close(self._wake)

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:  # NIXL's have no base of their own
            self._lose_all(f"NIXL error: {error}")
        self._lose_all(THIS_PROCESS_CLOSED)
        for _, peer in self._there:
            peer.put = peer.transfer = None
            peer.line.close()
        self._agent.close()

    def _work(self) -> None:
        """Move puts until the window is closed, then until peers have what was sent."""
        while not self._closing:
            self._look(self._turn())
        for _, peer in self._there:
            peer.puts.clear()
        self._inbox.clear()
        end = time.monotonic() + _WAIT_SLICE_S
        while any(peer.unconfirmed for _, peer in self._there) and time.monotonic() < end:
            self._look(self._turn())

    def _turn(self) -> bool:
        """Move what can move; return whether anything did."""
        moved = bool(self._inbox)
        while self._inbox:
            put = self._inbox.popleft()
            heapq.heappush(self._peer(put.peer).puts, put)
        for name, message in self._agent.arrived():
            moved = True
            self._arrive(name, message)
        for _, peer in self._there:
            if not peer.error:
                moved |= self._advance(peer)
        return moved

    def _advance(self, peer: Peer) -> bool:
        """Move a peer's puts on by one piece at most, and send what its line is owed."""
        try:
            moved = self._finish_piece(peer)
            if peer.put is None and peer.puts:
                self._begin_piece(peer, heapq.heappop(peer.puts))
                moved = True
        except Exception as error:  # NIXL's have no base of their own
            self._lose(peer, f"NIXL error: {error}")
            return True
        if peer.owed:
            with suppress(BlockingIOError, OSError):  # an end is noticed when it is read
                peer.owed = peer.owed[peer.line.send(peer.owed) :]
        if peer.ended_at is not None and peer.drained(time.monotonic()):
            self._lose(peer, PEER_CLOSED)
        return moved

    def _begin_piece(self, peer: Peer, put: Put) -> None:
        peer.put = put
        if not put.begun:
            put.begun = True
            peer.owed += PROMISE
            for source in put.sources:
                self._agent.memory.take(source)
                put.left.append((source.data_ptr(), source.numel()))
        pieces = put.cut(PIECE)
        if not pieces:
            self._agent.notify(peer.name, put.message)
            return
        message = b"" if put.left else put.message
        peer.transfer = self._agent.write(peer.name, pieces, peer.memory + put.offset, message)
        put.offset += sum(size for _, size in pieces)

    def _finish_piece(self, peer: Peer) -> bool:
        put = peer.put
        if put is None or (peer.transfer is not None and not self._agent.done(peer.transfer)):
            return False
        peer.put = peer.transfer = None
        if put.left:
            heapq.heappush(peer.puts, put)
            return True
        for source in put.sources:
            self._agent.memory.give_back(source)
        with self.changed:
            peer.finished += 1
            peer.under_way -= 1
            self.changed.notify_all()
        return True

    def _arrive(self, name: str, message: bytes) -> None:
        rank = self._rank_of.get(name)
        if rank is None:
            return
        peer = self._peer(rank)
        if len(message) != _MESSAGE.size:
            return self._lose(peer, INVALID_PUT)
        notification, value = _MESSAGE.unpack(message)
        if notification >= self._values.shape[1]:
            return self._lose(peer, INVALID_PUT)
        peer.came += 1
        peer.owed += ARRIVED
        with self.changed:
            self._values[rank, notification] = value
            self.events += notification < self.subscribed
            self.changed.notify_all()

    def _look(self, moved: bool) -> None:
        """Receive from the lines; sleep for them if nothing else is under way."""
        waiting = any(peer.expects for _, peer in self._there)
        self._pause = _PAUSES_S[0] if moved else min(1.5 * self._pause, _PAUSES_S[1])
        if waiting and not moved:
            time.sleep(self._pause)
        for number, _ in self._poll.poll(0 if moved or waiting else _IDLE_MS):
            if number == self._wake:
                os.eventfd_read(self._wake)
            else:
                self._receive(number, self._lines[number])

    def _receive(self, number: int, peer: Peer) -> None:
        try:
            received = peer.line.recv(4096)
        except BlockingIOError:
            return
        except OSError as error:
            received = b""
            self._lose(peer, error.strerror or str(error))
        if received.strip(PROMISE + ARRIVED):
            self._lose(peer, INVALID_PUT)
        peer.promised += received.count(PROMISE)
        peer.confirmed += received.count(ARRIVED)
        if not received:
            self._poll.unregister(number)
            peer.ended_at = time.monotonic()

    def _lose(self, peer: Peer, error: str) -> None:
        with self.changed:
            peer.error = peer.error or error
            self.changed.notify_all()

    def _lose_all(self, error: str) -> None:
        for _, peer in self._there:
            self._lose(peer, error)

    def _peer(self, rank: int) -> Peer:
        peer = self.peers[rank]
        assert peer is not None
        return peer


def _close_lines(engine: NixlEngine) -> None:
    for _, peer in engine._there:
        peer.line.close()
