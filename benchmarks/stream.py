"""A plain stream between ranks: what the hardware takes to move bytes, and nothing else.

    rank 0 ──▶ rank 1 ──▶ … ──▶ rank 0        one thread sends, one receives, in big calls

No order, no sums, no framing. Beside a step it is the floor under every exchange of as many bytes;
alone it is the link's line rate.
"""

from __future__ import annotations

import socket
import struct
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from torch._C._distributed_c10d import Store

LIMIT = 60  # seconds to wait for a neighbour


class Stream:
    """Sends `size` bytes to the next rank and receives as many from the one before."""

    def __init__(self, store: Store, *, rank: int, ranks: int, address: str, size: int) -> None:
        """Connect to both neighbours; collective."""
        with socket.create_server((address, 0)) as server:
            server.settimeout(LIMIT)
            store.set(f"stream of {rank}", str(server.getsockname()[1]))
            store.set(f"address of {rank}", address)
            following = (rank + 1) % ranks
            peer = store.get(f"address of {following}").decode()
            port = int(store.get(f"stream of {following}"))
            self._to = socket.create_connection((peer, port), LIMIT)
            self._from, _ = server.accept()
        for end in (self._to, self._from):
            _limit(end)
        # Ones, as the kernel gives untouched zeros no memory.
        self._out = np.ones(size, np.uint8).data
        self._in = np.ones(size, np.uint8).data
        self._threads = ThreadPoolExecutor(2, "stream")
        self._running: list[Future[None]] = []

    def start(self) -> None:
        """Begin to move the bytes."""
        self._running = [self._threads.submit(self._send), self._threads.submit(self._receive)]

    def wait(self) -> None:
        """Return once they are there, both ways.

        Raises:
            OSError: the neighbour is gone, or was silent for `LIMIT` seconds.
        """
        for moving in self._running:
            moving.result()

    def close(self) -> None:
        """Give up the connections."""
        self._threads.shutdown()
        self._to.close()
        self._from.close()

    def _send(self) -> None:
        self._to.sendall(self._out)

    def _receive(self) -> None:
        got = self._from.recv_into(self._in, len(self._in), socket.MSG_WAITALL)
        if got < len(self._in):
            raise ConnectionError(f"the stream ended after {got} of {len(self._in)} bytes")


def _limit(end: socket.socket) -> None:
    """Limit every wait in the kernel: Python's own time-out would cut large calls into pieces."""
    end.settimeout(None)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", LIMIT, 0))
