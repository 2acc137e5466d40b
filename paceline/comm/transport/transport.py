"""Python's side of the event loop (`event_loop.py`): its arrays, its thread, sleeping threads."""

from __future__ import annotations

import heapq
import os
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from math import prod
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

import numpy as np
from numpy.typing import NDArray

from paceline.comm.transport import event_loop as loop
from paceline.comm.transport.system_calls import Lock, write_word
from paceline.comm.window import INVALID_PUT, PEER_CLOSED, THIS_PROCESS_CLOSED, PutEvent
from paceline.errors import CommError, Message

CHUNK = 2**18  # bytes of a frame at most
# A put that several connections share needs a notification
# on each of them, which a small one doesn't earn back.
_SHARED = 2**17  # bytes of a put that several connections share, at least
_PUTS = 2**16  # pieces that can be under way
_SLEEPERS = 16  # threads that can sleep at once
_CLOSE_S = 5.0
# A peer that ends closes one connection after another. Until the last one has ended, what it sent
# before may still arrive on the others.
_TOGETHER_S = 2.0  # within which an ending peer closes all its connections
_CLOSED = (-1, -1)
# To look through the rows of all puts at each put would cost more than to send a small one.
_FEW = 16  # sent puts whose rows and sources are not reclaimed yet
_ROW = struct.Struct(f"{loop.PUTS}q")  # numpy takes five times as long to write one
_SLEEPER = struct.Struct(f"{loop.WAIT}q")

_Words = NDArray[np.int64]


class Transport:
    """Transport: sends puts to peers and receives peers' puts into this rank's window.

    Args:
        sockets: for each rank, its connected streams; empty for this rank.
        memory: (bytes,) of uint8, this rank's memory, into which peers write.
        notifications: the number of notification slots per peer.
        marks: the number of newest put events to retain.

    Attributes:
        values: (peers, notifications), the last value of each notification; the transport thread
            writes it.
    """

    def __init__(
        self,
        sockets: Sequence[Sequence[socket.socket]],
        memory: NDArray[np.uint8],
        notifications: int,
        marks: int = 0,
    ) -> None:
        self._sockets = [end for ends in sockets for end in ends]
        count = len(self._sockets)
        self._memory = memory
        self._control = os.pipe()
        self._lock = Lock()
        self._state = _words(loop.STATE)
        self._state[[loop.CONTROL, loop.CHUNK, loop.LOCK]] = (
            self._control[0],
            CHUNK,
            self._lock.address,
        )
        self._state[loop.SUBSCRIBED] = notifications
        self._state[[loop.MEMORY, loop.SIZE]] = memory.ctypes.data, memory.size
        self._links = _words(count, loop.LINK)
        self._links[:, loop.PUT] = loop.NONE
        self._links[:, loop.FD] = [end.fileno() for end in self._sockets]
        self._links[:, loop.ALIVE] = 1
        behind = list(accumulate(map(len, sockets)))
        self._of = [range(end - len(ends), end) for ends, end in zip(sockets, behind, strict=True)]
        for peer, links in enumerate(self._of):
            self._links[links, loop.OF_PEER] = peer
            self._links[links, loop.FIRST] = links.start
            self._links[links, loop.BEHIND] = links.stop
        self._puts = _untouched_words(_PUTS, loop.PUTS)
        self.values = _words(len(sockets), notifications)
        self._waits = _words(_SLEEPERS, loop.WAIT)
        self._asleep = self._waits.data.cast("B")
        self._marks = _words(marks, loop.MARK)
        self._rows = self._puts.data.cast("B")
        self._words = self._state.data
        self._free: list[int] = []  # a heap of rows below `_top`
        self._sources: dict[int, object] = {}
        self._order = self._top = 0
        self._gone = 0
        self._putting = threading.Lock()
        self._slots: queue.SimpleQueue[tuple[int, WakeEvent]] = queue.SimpleQueue()
        for slot in range(_SLEEPERS):
            self._slots.put((slot, WakeEvent()))
        self._failure = ""
        self._ends: dict[int, float] = {}  # when a peer was first seen to have closed some
        arrays = (
            self._state,
            self._links,
            self._puts,
            _words(count, notifications),
            self.values,
            self._waits,
            _words(2, count, loop.HEAD_WORDS),
            np.zeros((count + 1, 2), np.int32),
            _words(12),
            _words(512),
            np.zeros(1, np.int32),
            np.ones(1, np.int64),
            self._marks,
        )
        self._thread = threading.Thread(
            target=self._run, args=arrays, name="transport", daemon=True
        )
        self._prepare(arrays)
        self._thread.start()

    @property
    def events(self) -> int:
        """The number of subscribed notifications and of calls of `wake`."""
        events: int = self._words[loop.EVENTS]
        return events

    @property
    def whole(self) -> bool:
        """Whether all connections are open."""
        return not self._words[loop.ENDS]

    @property
    def moments(self) -> list[PutEvent]:
        """When puts were sent and notifications arrived, in order; the newest ones."""
        marked = int(self._state[loop.MARKED])
        size = len(self._marks)
        rows = self._marks[[number % size for number in range(max(0, marked - size), marked)]]
        return [
            PutEvent(
                arrived=what == loop.ARRIVED,
                peer=peer,
                notification=notification,
                value=value,
                at=seconds * 10**9 + nanoseconds,
            )
            for what, peer, notification, value, seconds, nanoseconds in rows.tolist()
        ]

    def error(self, peer: int) -> str:
        """Return why a peer's connections ended; "" as long as they are open.

        For a moment after one has ended, the peer's last puts may still arrive by the others.
        """
        if self.whole:
            return ""
        links = self._links[self._of[peer]]
        ended = links[:, loop.ALIVE] == 0
        broken = ended & (links[:, loop.ERROR] != loop.ENDED)
        if not ended.any():
            return ""
        if self._failure:
            return self._failure
        if not (ended.all() or broken.any()):
            since = self._ends.setdefault(peer, time.monotonic())
            if time.monotonic() < since + _TOGETHER_S:
                return ""
        known = {
            0: THIS_PROCESS_CLOSED,
            loop.ENDED: PEER_CLOSED,
            loop.INVALID: INVALID_PUT,
        }
        error = int(links[(broken if broken.any() else ended).argmax(), loop.ERROR])
        return known.get(error) or os.strerror(error)

    def ended_as(self, peer: int) -> int:
        """Return how many connections had ended when the last one of the peer ended, it included.

        0: none has, or this process ended them.
        """
        return int(self._links[self._of[peer], loop.ENDED_AS].max(initial=0))

    def subscribe(self, below: int) -> None:
        """Count only notifications below a number as events."""
        self._state[loop.SUBSCRIBED] = below

    def put(
        self,
        peer: int,
        pieces: Sequence[tuple[int, int]],
        target: tuple[int, int, int],
        priority: int,
        keep: object,
    ) -> None:
        """Queue a put, unless the connections are closed.

        Args:
            peer: the receiving rank.
            pieces: addresses and sizes of its memory ranges.
            target: offset in the peer's memory, notification, value.
            priority: smaller goes first.
            keep: the objects that own the sources' memory.

        Raises:
            CommError: too many puts are in flight.
        """
        only = loop.ANY
        if sum(size for _, size in pieces) < _SHARED:
            only = target[1] % len(self._of[peer])
        with self._putting:
            if self._control == _CLOSED:
                return
            slots = self._take(max(1, len(pieces)))
            self._order += 1
            if pieces:
                self._sources[slots[-1]] = keep
            rest = loop.NONE
            for slot, piece in zip(reversed(slots), reversed(pieces or [(0, 0)]), strict=True):
                status = loop.NEW if slot == slots[0] else loop.WAITING
                row = (status, peer, priority, self._order, *piece, *target, rest, only, 0, 0)
                # From the last piece to the first: each names the one that follows it.
                _ROW.pack_into(self._rows, slot * _ROW.size, *row)
                rest = slot
            # After the rows are filled: the loop reads them as soon as it has the number.
            write_word(self._control[1], slots[0])

    def sending(self, peer: int) -> bool:
        """Return whether a put to a peer is under way."""
        puts = self._puts[: self._top]
        status = puts[:, loop.STATUS]
        mine = (status == loop.NEW) | (status == loop.QUEUED) | (status == loop.WAITING)
        return bool((mine & (puts[:, loop.TO] == peer)).any())

    def sleep(self, peer: int, ready: Callable[[], bool], limit: float) -> bool:
        """Sleep until a condition holds, for `limit` seconds at most; return whether it holds.

        Args:
            peer: the condition is evaluated after each arrival from, or send to, this peer; or
                `loop.ANY_PEER`.
            ready: the condition; quick, called under the event loop's lock.
            limit: seconds.
        """
        # What was sent is released here, where the thread has nothing better to do.
        if self._sources:
            self.reap()
        if ready():
            return True
        deadline = time.monotonic() + limit
        slot, event = self._slots.get()
        woken = True
        try:
            while True:
                with self._lock:
                    if ready():
                        return True
                    # Under the lock with the look before it: the loop
                    # can't notify between the two and find no sleeper.
                    _SLEEPER.pack_into(self._asleep, slot * _SLEEPER.size, 1, peer, event.number)
                woken = False
                woken = event.sleep(deadline - time.monotonic())
                if not woken:
                    return ready()
        finally:
            if not woken:
                with self._lock:
                    self._waits[slot, loop.ASLEEP] = 0  # the loop no longer writes to the event
                event.clear()
            self._slots.put((slot, event))

    def wake(self) -> None:
        """Count an event of this process."""
        with self._lock:
            self._state[loop.EVENTS] += 1
            asleep = self._waits[:, loop.ASLEEP] & (self._waits[:, loop.PEER] == loop.ANY_PEER)
            for slot in np.flatnonzero(asleep).tolist():
                self._waits[slot, loop.ASLEEP] = 0
                write_word(int(self._waits[slot, loop.EVENT]), 1)

    def interrupt(self) -> None:
        """Shut the connections down, from any thread; every sleeping thread wakes."""
        with self._putting:
            if self._control == _CLOSED:
                return
            for end in self._sockets:  # open: the thread closes them under the lock
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the event loop and close the connections; every sleeping thread wakes."""
        with self._putting:
            if self._control != _CLOSED:
                write_word(self._control[1], loop.STOP)
        self._thread.join(_CLOSE_S)
        self._end_all()
        for end in self._sockets if self._thread.is_alive() else ():
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # closed by the thread, at its end

    def _prepare(self, arrays: tuple[object, ...]) -> None:
        """Run the loop until the stop that is already written, so that numba compiles it here.

        Compiling takes half a minute on a busy machine. In the transport thread it would count
        against the limits of the first waits, and keep `close` from stopping the loop.
        """
        write_word(self._control[1], loop.STOP)
        with suppress(Exception):  # the thread fails alike, and reports it
            loop.run(*arrays)

    def _run(self, *arrays: object) -> None:
        """Run the loop, then close what it uses: no other thread may free these descriptors.

        Their numbers would be given to the next window, whose commands this loop would read.
        """
        try:
            loop.run(*arrays)
        # No other thread would learn of it: their waits end with this reason.
        except BaseException as error:
            what = f"{type(error).__name__}: {error}"
            self._failure = f"the transport thread of this process has stopped ({what})"
        self._end_all()
        with self._putting:
            for end in self._sockets:
                end.close()
            for descriptor in self._control:
                os.close(descriptor)
            self._control = _CLOSED

    def _end_all(self) -> None:
        """Mark all connections as ended, and wake all sleeping threads."""
        with self._lock:
            self._links[:, loop.ALIVE] = 0
            self._words[loop.ENDS] += 1
            asleep = [int(row[loop.EVENT]) for row in self._waits if row[loop.ASLEEP]]
            self._waits[:, loop.ASLEEP] = 0  # each is woken once
        for event in asleep:
            os.eventfd_write(event, 1)

    def _take(self, count: int) -> list[int]:
        """Take free rows, the lowest first."""
        if self._words[loop.GONE] - self._gone > _FEW or self._room < count:
            self._reap()
        if self._room < count:
            raise CommError(
                Message(
                    "{:,} chunks are in flight, which is the maximum: a peer does not receive, or "
                    "there are too many buckets; use a larger {--bucket_mb}.",
                    _PUTS,
                )
            )
        # The lowest, because the loop looks at all rows up to the highest that is in use.
        slots = []
        for _ in range(count):
            if self._free:
                slots.append(heapq.heappop(self._free))
            else:
                slots.append(self._top)
                self._top += 1
        return slots

    @property
    def _room(self) -> int:
        """The number of free rows."""
        return len(self._free) + _PUTS - self._top

    def reap(self) -> None:
        """Release the rows and sources of sent puts."""
        if self._words[loop.GONE] != self._gone:
            with self._putting:
                self._reap()

    def _reap(self) -> None:
        gone = self._words[loop.GONE]
        if gone == self._gone:
            return
        self._gone = gone
        sent = self._puts[: self._state[loop.TOP], loop.STATUS] == loop.SENT
        for slot in np.flatnonzero(sent).tolist():
            self._puts[slot, loop.STATUS] = loop.FREE
            self._sources.pop(slot, None)
            heapq.heappush(self._free, slot)


def _words(*shape: int) -> _Words:
    return np.zeros(shape, np.int64)


def _untouched_words(*shape: int) -> _Words:
    """Return zeros of which no page takes memory before it is written."""
    pages = mmap(-1, 8 * prod(shape), MAP_PRIVATE | MAP_ANONYMOUS)
    return np.frombuffer(pages, np.int64).reshape(shape)


class WakeEvent:
    """Event that wakes a thread (eventfd).

    Attributes:
        number: the file descriptor; a 64-bit word written to it wakes the thread.
    """

    def __init__(self) -> None:
        self.number = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self.number, select.POLLIN)

    def sleep(self, limit: float) -> bool:
        """Sleep; return False at the limit."""
        if limit <= 0 or not self._poll.poll(limit * 1000):
            return False
        self.clear()
        return True

    def clear(self) -> None:
        """Discard what was written to it."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.number)

    def __del__(self) -> None:
        os.close(self.number)
