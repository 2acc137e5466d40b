"""Proxy that carries connections to a port, and records what each side sends first."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

from tests.harness.network.window_kinds import LIMIT

RECORDED = 4096  # bytes of each side, its whole greeting included


class RecordingProxy:
    """Carries every connection to a port, until it is closed.

    Attributes:
        port: to dial instead.
        dialed: what each connection's dialer sent first, in the order of connections.
        answered: what each one's listener sent first.
    """

    def __init__(self, port: int) -> None:
        self._to = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.dialed: list[bytearray] = []
        self.answered: list[bytearray] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        """Carry no more connections; return once those that it carries have ended."""
        self._server.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(LIMIT)
            assert not thread.is_alive()
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                dialer, _ = self._server.accept()
                self._threads.append(threading.Thread(target=self._connect, args=(dialer,)))
                self._threads[-1].start()

    def _connect(self, dialer: socket.socket) -> None:
        with dialer, socket.create_connection(("127.0.0.1", self._to), LIMIT) as listener:
            self.dialed.append(bytearray())
            self.answered.append(bytearray())
            back = (listener, dialer, self.answered[-1])
            thread = threading.Thread(target=_carry, args=back)
            thread.start()
            _carry(dialer, listener, self.dialed[-1])
            thread.join()


def _carry(source: socket.socket, target: socket.socket, recording: bytearray) -> None:
    with suppress(OSError):
        while data := source.recv(2**16):
            recording += data[: RECORDED - len(recording)]
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
