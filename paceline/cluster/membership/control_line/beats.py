"""Python's side of the beat thread (`beat_loop.py`): its arrays, its thread, its connections."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from paceline.cluster.membership.control_line import beat_loop as loop
from paceline.comm.transport.system_calls import write_word

_ROWS = 4096  # connections at most
_CLOSE_S = 5.0
_NS = 1e9


class Beats:
    """Beats on connections: sent and received by one thread, which needs no interpreter's lock.

    All methods but `last`, `silence`, `carry` and `carried` are called on one thread.

    Args:
        interval: seconds between two beats.

    Attributes:
        event: descriptor (eventfd) that becomes readable when a connection ends.
    """

    def __init__(self, interval: float) -> None:
        self._sockets: dict[int, socket.socket] = {}  # by row, until the loop has released them
        self._free = list(range(_ROWS - 1, -1, -1))
        self._closed = False
        self._control = os.pipe()
        self.event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._state = _words(loop.STATE)
        self._rows = _words(_ROWS, loop.ROW)
        self._state[loop.CONTROL] = self._control[0]
        self._state[loop.EVENT] = self.event
        self._state[loop.INTERVAL] = round(interval * _NS)
        arrays = (
            self._state,
            self._rows,
            np.zeros((_ROWS + 1, 2), np.int32),
            _words(64),
            np.zeros(256, np.uint8),
            _words(2),
            np.ones(1, np.int64),
        )
        # With this command in the pipe the first call of
        # the loop, which compiles it, returns at once.
        write_word(self._control[1], loop.STOP)
        loop.run(*arrays)  # numba compiles it here, not while beats are due
        self._thread = threading.Thread(
            target=loop.run, args=arrays, name="control beats", daemon=True
        )
        self._thread.start()

    def add(self, connection: socket.socket) -> int:
        """Send and receive beats on a connection; return its row."""
        row = self._free.pop()
        self._sockets[row] = connection
        now = time.monotonic_ns()
        self._rows[row] = connection.fileno(), loop.FREE, 0, now, now, 0
        write_word(self._control[1], 2 * row + loop.ADD)
        return row

    def remove(self, row: int) -> None:
        """Shut a connection down; it is closed when the thread has released it."""
        with suppress(OSError):
            self._sockets[row].shutdown(socket.SHUT_RDWR)
        write_word(self._control[1], 2 * row + loop.REMOVE)

    def ended(self) -> Iterator[tuple[int, int]]:
        """Close released connections; yield the row and the error of each that has ended."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.event)
        for row in list(self._sockets):
            status, error = self._rows[row, [loop.STATUS, loop.ERROR]].tolist()
            # Not before: the loop might still send on a
            # descriptor whose number is another file's by then.
            if status == loop.RELEASED:
                self._rows[row, loop.STATUS] = loop.FREE
                self._sockets.pop(row).close()
                self._free.append(row)
            elif status == loop.ENDED:
                yield row, error

    def last(self, row: int) -> float:
        """Return the moment of the last beat received, by `time.monotonic`."""
        return float(self._rows[row, loop.HEARD] / _NS)

    def silence(self, row: int) -> float:
        """Return for how many seconds the thread, while it ran, has received no beat."""
        since = self._state[loop.PASSED] - self._rows[row, loop.SILENT_SINCE]
        return max(0.0, float(since / _NS))

    def carry(self, number: int) -> None:
        """Let each beat carry a number, 0 to 255, from now on."""
        self._state[loop.NUMBER] = number

    def carried(self, row: int) -> int:
        """Return the number that the last beat received carries; 0 before the first one."""
        return int(self._rows[row, loop.CARRIED])

    def close(self) -> None:
        """End the thread and close all connections."""
        write_word(self._control[1], loop.STOP)
        self._thread.join(_CLOSE_S)
        assert not self._thread.is_alive()
        self.close_descriptors()

    def close_descriptors(self) -> None:
        """Close all descriptors, unless they are closed; in a forked child, or without a thread."""
        if self._closed:
            return
        self._closed = True
        for connection in self._sockets.values():
            connection.close()
        for descriptor in (*self._control, self.event):
            os.close(descriptor)


def _words(*shape: int) -> NDArray[np.int64]:
    return np.zeros(shape, np.int64)
