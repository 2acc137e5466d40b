"""Relay between the two ends of a TCP connection, which cuts it after a given byte."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

from tests.harness.network.window_kinds import LIMIT

GREETING = 567 + 32  # bytes of the caller's, before its first put


class Relay:
    """Carries one connection's bytes, until so many of the caller's have passed.

    Args:
        to: "HOST PORT" of who is called.
        cut_after: bytes of the caller's that pass, after its greeting.

    Attributes:
        where: "HOST PORT" to call instead.
    """

    def __init__(self, to: str, cut_after: int) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.where = f"127.0.0.1 {self._server.getsockname()[1]}"
        self._to, self._left = to, GREETING + cut_after
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def close(self) -> None:
        """Wait for the cut."""
        self._thread.join(LIMIT)
        self._server.close()
        assert not self._thread.is_alive()

    def _carry(self) -> None:
        host, port = self._to.split()
        self._server.settimeout(LIMIT)
        caller, _ = self._server.accept()
        with caller, socket.create_connection((host, int(port)), LIMIT) as callee:
            back = threading.Thread(target=_pass_on, args=(callee, caller))
            back.start()
            while self._left and (some := caller.recv(min(self._left, 2**16))):
                callee.sendall(some)
                self._left -= len(some)
            for end in (callee, caller):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            back.join(LIMIT)


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while some := source.recv(2**16):
            target.sendall(some)
