"""torch's TCP store: served by torch, used through a client of our own.

The server is torch's `TCPStore`, in machine 0's supervisor or in rank 0. Its port is bound here, so
that a port that is taken is an error with its flag, and so that the system chooses the port (0)
where no process outside this machine connects.

The client is not torch's, whose calls have no limit of their own: a server that was stopped, or cut
off, would keep its callers for ever, in C++, where no signal of Python's reaches them. Here every
call ends within `_ANSWER_S`, and the next one connects anew. The messages, in native byte order,
with `<bytes>` as a length of 8 bytes and so many bytes:

    VALIDATE     0  magic number (4 bytes)
    SET          1  <key> <value>
    COMPARE_SET  2  <key> <expected> <desired>     answers <value>
    ADD          4  <key> number (8 bytes)         answers the sum (8 bytes)
    DELETE_KEY   8  <key>                          answers the number deleted (8 bytes)
    APPEND       9  <key> <value>
    PING        13  4 bytes                        answers these

`SET` and `APPEND` answer nothing, so a `PING` follows them. A COMPARE_SET that expects a random
value reads a key without a wait: for a missing key the server returns the expected value.

The server authenticates no process. `SealedStore` keeps the values from those without the secret.

See torch/csrc/distributed/c10d/TCPStoreBackend.hpp and TCPStore.cpp.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from paceline.cluster.stores.polled_store import PolledStore, as_bytes
from paceline.comm.addresses import family_of, host_and_port, loopback
from paceline.errors import CommError, ConfigError

_CONNECT_S = 3.0
_ANSWER_S = 5.0
_VALIDATE = struct.pack("=BI", 0, 0x3C85F7CE)
_SET = b"\x01"
_COMPARE_SET = b"\x02"
_ADD = b"\x04"
_DELETE_KEY = b"\x08"
_APPEND = b"\x09"
_PING = b"\x0d"
_NUMBER = struct.Struct("=q")
_SILENT = "no store answers there"


class TcpStore(PolledStore):
    """Client of a TCP store that this module, or torchrun, serves.

    Args:
        address: HOST:PORT.
        space: prefix of all keys; "" for none.
        timeout: seconds that `get` waits; also the default timeout of `wait`.
        make: unused: a prefix needs no creation.

    Raises:
        ConfigError: the host name can't be resolved.
        CommError: no store answers at the address (yet).
    """

    served_by_run = True

    def __init__(self, address: str, space: str, timeout: timedelta, *, make: bool = False) -> None:
        super().__init__(address, space, timeout)
        self._prefix = f"/{space}/" if space else "/"
        self._lock = threading.Lock()  # over `_connection`: one request at a time
        self._connection: socket.socket | None = self._connect()

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self._value(key) for key in keys]

    def set(self, key: str, value: str | bytes) -> None:
        self._confirmed(_SET + self._key(key) + _counted(as_bytes(value)))

    def add(self, key: str, value: int) -> int:
        return self._number(_ADD + self._key(key) + _NUMBER.pack(value))

    def append(self, key: str, value: str | bytes) -> None:
        self._confirmed(_APPEND + self._key(key) + _counted(as_bytes(value)))

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        values = _counted(as_bytes(expected_value)) + _counted(as_bytes(desired_value))
        return self._ask(_COMPARE_SET + self._key(key) + values, None)

    def delete_key(self, key: str) -> bool:
        return self._number(_DELETE_KEY + self._key(key)) > 0

    def _value(self, key: str) -> bytes | None:
        # No key has that value, so the comparison fails and changes nothing: this is a read.
        absent = secrets.token_bytes(16)
        value = self.compare_set(key, absent, absent)
        return None if value == absent else value

    def _key(self, key: str) -> bytes:
        return _counted((self._prefix + key).encode())

    def _number(self, request: bytes) -> int:
        number: int = _NUMBER.unpack(self._ask(request, _NUMBER.size))[0]
        return number

    def _confirmed(self, request: bytes) -> None:
        word = secrets.token_bytes(4)
        # The server answers a SET with nothing: only the
        # answer to what follows shows that it was received.
        self._ask(request + _PING + word, len(word))

    def _ask(self, request: bytes, size: int | None) -> bytes:
        """Send a request; return the answer of `size` bytes, or of a length that it gives."""
        if not self._lock.acquire(timeout=2 * _ANSWER_S):
            raise CommError(
                "This thread timed out waiting for another thread of this process, which is still "
                f"waiting for an answer from the store at {self.address}."
            )
        try:
            if self._connection is None:
                self._connection = self._connect()
            deadline = time.monotonic() + _ANSWER_S
            self._connection.settimeout(_ANSWER_S)
            self._connection.sendall(request)
            if size is None:
                size = _NUMBER.unpack(_receive(self._connection, _NUMBER.size, deadline))[0]
            return _receive(self._connection, size, deadline)
        except OSError as error:
            # The answer may still come on this connection,
            # and would be taken for that of the next request.
            self.close()
            late = f"no answer within {_ANSWER_S:g} s"
            reason = late if isinstance(error, TimeoutError) else error.strerror or str(error)
            raise CommError(f"The store at {self.address} is lost: {reason}.") from error
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close the connection, on which an answer may still come; the next request makes one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self) -> socket.socket:
        """Connect, and see that a store answers."""
        host, port = split_address(self.address)
        connection: socket.socket | None = None
        word = secrets.token_bytes(4)
        try:
            connection = socket.create_connection((host, port), timeout=_CONNECT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(_ANSWER_S)
            connection.sendall(_VALIDATE + _PING + word)
            if _receive(connection, len(word), time.monotonic() + _ANSWER_S) != word:
                raise OSError(errno.EPROTO, _SILENT)
        except OSError as error:
            if connection is not None:
                connection.close()
            if isinstance(error, socket.gaierror):
                raise ConfigError(
                    f"{host}:{port}: the name {host} can't be resolved on this machine; give an "
                    "address, or a name that it can resolve."
                ) from error
            reason = error.strerror or _SILENT
            where = host_and_port(host, port)
            raise CommError(f"{where} can't be reached: {reason}.") from error
        # C++ may drop the last reference to a store, and then no `close` is called.
        weakref.finalize(self, connection.close)
        return connection


def serve_tcp(host: str, port: int, timeout: timedelta, port_source: str = "--master") -> TCPStore:
    """Serve a store on `host` ("" for all interfaces) and `port` (0: one that is free).

    Args:
        host: where to listen.
        port: where to listen.
        timeout: the limit of the store's `get`.
        port_source: the flag or variable that names the port.

    Raises:
        ConfigError: the port can't be opened.
    """
    try:
        listener = socket.create_server((host, port), family=family_of(host), backlog=1024)
    except OSError as error:
        raise ConfigError(
            f"{port_source}: port {port} can't be opened on this machine "
            f"({os.strerror(error.errno or 0)}): another run may be using it; choose another port."
        ) from error
    port = listener.getsockname()[1]
    store = TCPStore(
        host or loopback(),
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.fileno(),
    )
    listener.detach()  # the store's own from now on
    return store


def split_address(address: str, source: str = "MASTER_ADDR:MASTER_PORT") -> tuple[str, int]:
    """Read HOST:PORT.

    Args:
        source: the flag or the variables that give it. `--master` is checked where flags are read,
            so later only a launcher's variables can be wrong.

    Raises:
        ConfigError: it is something else; names the source.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")  # of an IPv6 address
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{source} {address}: give it as HOST:PORT, such as node0:29500.")
    return host, int(port)


def _counted(data: bytes) -> bytes:
    return _NUMBER.pack(len(data)) + data


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        more = connection.recv(size - len(data))
        if not more:
            raise OSError(errno.ECONNRESET, _SILENT)
        data += more
    return bytes(data)
