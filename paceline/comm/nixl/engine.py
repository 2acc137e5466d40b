"""The thread of a NIXL window: what is put goes to NIXL piece by piece, what arrives is told.

Beside NIXL's own way to each peer there is a line, a TCP connection whose greeting had the job's
token. It carries two kinds of bytes:

    PROMISE   "a put to you begins": the peer looks into NIXL until it has arrived
    ARRIVED   "one of yours has": who closes waits for these for a moment

Between puts all threads sleep in the kernel, on their lines; NIXL itself could only be asked again
and again. A line that ends is a peer that is lost.
"""

from __future__ import annotations

import heapq
import os
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.comm.nixl.agent import NixlAgent
from paceline.comm.nixl.peer import WAIT_SLICE_S, Peer, Put

PIECE = 2**22  # bytes that go before something more urgent can
PROMISE, ARRIVED = b"p", b"a"
_MESSAGE = struct.Struct("!Iq")  # notification, value
_PAUSES_S = 5e-5, 1e-3  # between two looks into NIXL while something is under way: grows
_IDLE_MS = 500


class NixlEngine:
    """Moves puts, in a thread.

    Args:
        agent: with this rank's memory registered.
        peers: by rank; None for this one.
        values: (world_size, notifications), written when a put has arrived.

    Attributes:
        changed: is notified of whatever `values`, `events` and the peers' errors say.
        events: how many notifications, of those that are `subscribed`, and nudges there were.
        subscribed: notifications with smaller numbers count.
    """

    def __init__(
        self, agent: NixlAgent, peers: Sequence[Peer | None], values: NDArray[np.int64]
    ) -> None:
        self.changed = threading.Condition()
        self.events, self.subscribed = 0, values.shape[1]
        self.peers = peers
        self._agent, self._values = agent, values
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
        self._thread = threading.Thread(target=self._run, name="nixl window", daemon=True)
        self._thread.start()

    def put(
        self, rank: int, sources: list[Tensor], offset: int, target: tuple[int, int], priority: int
    ) -> None:
        """Queue a put of (bytes,) of uint8 each, for (notification, value); not while it closes."""
        peer = self.peers[rank]
        assert peer is not None
        with self.changed:
            if self._closing:
                return
            self._number += 1
            message = _MESSAGE.pack(*target)
            self._inbox.append(Put(priority, self._number, rank, sources, offset, message))
            peer.under_way += 1
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Drop what hasn't gone, and end; whoever waits is told."""
        with self.changed:
            if self._closing:
                return
            self._closing = True
            os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:  # NIXL's have no base of their own
            self._lose_all(f"NIXL says {error}")
        self._lose_all("this process closed it")
        for _, peer in self._there:
            peer.put = peer.transfer = None
            peer.line.close()
        self._agent.close()

    def _work(self) -> None:
        """Go on until the window is closed, and then until peers have what has left."""
        while not self._closing:
            self._look(self._turn())
        for _, peer in self._there:
            peer.puts.clear()
        self._inbox.clear()
        end = time.monotonic() + WAIT_SLICE_S
        while any(peer.unconfirmed for _, peer in self._there) and time.monotonic() < end:
            self._look(self._turn())

    def _turn(self) -> bool:
        """Move what can move; tell whether anything did."""
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
        """Move a peer's puts on by one piece at most, and say on its line what it is owed."""
        try:
            moved = self._finish_piece(peer)
            if peer.put is None and peer.puts:
                self._begin_piece(peer, heapq.heappop(peer.puts))
                moved = True
        except Exception as error:  # NIXL's have no base of their own
            self._lose(peer, f"NIXL says {error}")
            return True
        if peer.owed:
            with suppress(BlockingIOError, OSError):  # an end is noticed when it is read
                peer.owed = peer.owed[peer.line.send(peer.owed) :]
        if peer.gone_at is not None and peer.heard_out(time.monotonic()):
            self._lose(peer, "the peer closed it")
        return moved

    def _begin_piece(self, peer: Peer, put: Put) -> None:
        peer.put = put
        if not put.begun:
            self._begin(peer, put)
        pieces = put.cut(PIECE)
        if not pieces:
            self._agent.tell(peer.name, put.message)
            return
        message = b"" if put.left else put.message
        peer.transfer = self._agent.write(peer.name, pieces, peer.memory + put.offset, message)
        put.offset += sum(size for _, size in pieces)

    def _begin(self, peer: Peer, put: Put) -> None:
        put.begun = True
        peer.owed += PROMISE
        for source in put.sources:
            self._agent.take(source)
            put.left.append((source.data_ptr(), source.numel()))

    def _finish_piece(self, peer: Peer) -> bool:
        put = peer.put
        if put is None or (peer.transfer is not None and not self._agent.done(peer.transfer)):
            return False
        peer.put = peer.transfer = None
        if put.left:
            heapq.heappush(peer.puts, put)
            return True
        for source in put.sources:
            self._agent.give_back(source)
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
            return self._lose(peer, "the peer sent something that is no put")
        notification, value = _MESSAGE.unpack(message)
        if notification >= self._values.shape[1]:
            return self._lose(peer, "the peer sent something that is no put")
        peer.came += 1
        peer.owed += ARRIVED
        with self.changed:
            self._values[rank, notification] = value
            self.events += notification < self.subscribed
            self.changed.notify_all()

    def _look(self, moved: bool) -> None:
        """Hear what is said on the lines; sleep for it if nothing else goes on."""
        waiting = any(peer.expects for _, peer in self._there)
        self._pause = _PAUSES_S[0] if moved else min(1.5 * self._pause, _PAUSES_S[1])
        if waiting and not moved:
            time.sleep(self._pause)
        for number, _ in self._poll.poll(0 if moved or waiting else _IDLE_MS):
            if number == self._wake:
                os.eventfd_read(self._wake)
            else:
                self._hear(number, self._lines[number])

    def _hear(self, number: int, peer: Peer) -> None:
        try:
            said = peer.line.recv(4096)
        except BlockingIOError:
            return
        except OSError as error:
            said = b""
            self._lose(peer, error.strerror or str(error))
        if said.strip(PROMISE + ARRIVED):
            self._lose(peer, "the peer sent something that is no put")
        peer.promised += said.count(PROMISE)
        peer.confirmed += said.count(ARRIVED)
        if not said:
            self._poll.unregister(number)
            peer.gone_at = time.monotonic()

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
