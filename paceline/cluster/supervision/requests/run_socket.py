"""The socket at which a process of a run answers requests of its user, on its own machine.

    client                                    process of the run
    connect to the abstract Unix socket  ──▶  same user? (SO_PEERCRED)
    Request, end of input                ──▶  stop, or report
    Answer, end of output                ◀──

An abstract socket has no file, and ends with the process. One thread answers one client at a time,
within limits of time and of bytes.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Protocol

from paceline.cluster.json_record import JsonRecord
from paceline.cluster.supervision.requests.run_status import RunStatus
from paceline.comm.forked_children import close_in_children
from paceline.errors import CommError

CLIENT_S = 2.0
"""Seconds within which a client must send its request and read the answer."""

_BACKLOG = 16
_LONGEST_REQUEST = 4096  # bytes
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: struct ucred of unix(7)


@dataclass(frozen=True, kw_only=True)
class Request(JsonRecord):
    """Request to a process of a run."""

    kind: Literal["stop", "status"]


@dataclass(frozen=True, kw_only=True)
class Answer(JsonRecord):
    """Answer to a request.

    Attributes:
        error: why the request was refused, a sentence; "" if it wasn't.
        status: the run's status as text, if that was requested.
    """

    error: str = ""
    status: str = ""


class RequestHandler(Protocol):
    """Protocol of what obeys requests, in the socket's thread."""

    def stop(self) -> None:
        """Begin to end the run as SIGTERM would, and return at once."""

    def status(self) -> RunStatus:
        """Return the run's status at once, without waiting for the main thread."""


class RunSocket:
    """Socket with a thread that answers requests.

    Args:
        handler: obeys them.

    Attributes:
        name: the socket's name, without the zero byte that makes it abstract.
    """

    def __init__(self, handler: RequestHandler) -> None:
        self._handler = handler
        self.name = f"paceline-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(_BACKLOG)
        close_in_children(self, _close_listener)
        self._thread = threading.Thread(target=self._serve, name="run socket", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, and release the socket."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in `accept`
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * CLIENT_S)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            with client, suppress(OSError):  # a client that left, or was too slow
                self._answer(client)

    def _answer(self, client: socket.socket) -> None:
        deadline = time.monotonic() + CLIENT_S
        stops = False
        try:
            request = Request.from_text(receive_all(client, deadline, _LONGEST_REQUEST))
            # An abstract socket has no permissions: any user of the machine can connect.
            if peer_of(client)[1] != os.geteuid():
                raise CommError("the run belongs to another user; repeat the command as that user.")
            answer = self._obey(request)
            stops = request.kind == "stop"
        except OSError:
            raise
        except Exception as error:  # which the client prints
            answer = Answer(error=str(error) or type(error).__name__)
        try:
            send_all(client, answer.to_text().encode(), deadline)
        finally:
            if stops:  # the process may end at once, and its answer is on the way by now
                self._handler.stop()

    def _obey(self, request: Request) -> Answer:
        if request.kind == "stop":
            return Answer()
        if request.kind == "status":
            return Answer(status=self._handler.status().to_text())
        return Answer(error=f"there is no request {request.kind!r}: use the run's own version.")


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process number and the user number of the other end; the kernel vouches for it."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(credentials)
    return pid, user


def receive_all(connection: socket.socket, deadline: float, longest: int) -> bytes:
    """Receive what the other end sends, up to its end.

    Raises:
        OSError: it didn't come in time.
        CommError: it is longer than `longest` bytes.
    """
    received = bytearray()
    while True:
        _set_timeout(connection, deadline)
        piece = connection.recv(65536)
        if not piece:
            return bytes(received)
        received += piece
        if len(received) > longest:
            raise CommError(f"A message of more than {longest:,} bytes was refused.")


def send_all(connection: socket.socket, content: bytes, deadline: float) -> None:
    """Send all, and the end.

    Raises:
        OSError: the other end didn't read it in time.
    """
    _set_timeout(connection, deadline)
    connection.sendall(content)
    connection.shutdown(socket.SHUT_WR)


def _set_timeout(connection: socket.socket, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the other end is too slow")
    connection.settimeout(left)


def _close_listener(owner: RunSocket) -> None:
    with suppress(OSError):  # closed before
        os.close(owner._listener.detach())
