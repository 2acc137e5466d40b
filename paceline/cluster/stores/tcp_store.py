"""torch's own TCP store, served by machine 0's supervisor.

Nothing is added to it but sentences: the port is bound here, so that one that is taken is said
with its flag, and asked of the system (port 0) where nobody outside this machine comes. A client
knocks before torch's own client does, which would wait without a limit for an answer of somebody
silent, and print C++ stacks about what isn't a store:

    knock     [0][magic number, 4 bytes] [13][4 random bytes]      the store's VALIDATE and PING
    answer    the 4 bytes

See torch/csrc/distributed/c10d/TCPStoreBackend.hpp.
"""

from __future__ import annotations

import errno
import secrets
import socket
import struct
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

from paceline.errors import CommError, ConfigError

_CONNECT_S = 3.0
_ANSWER_S = 5.0
_VALIDATE = struct.pack("=BI", 0, 0x3C85F7CE)
_PING = b"\x0d"
_SILENT = "no store answers there"


def serve_tcp(host: str, port: int, timeout: timedelta, given: str = "--master") -> TCPStore:
    """Serve a store on `host` ("" for all interfaces) and `port` (0: one that is free).

    Args:
        host: where to listen.
        port: where to listen.
        timeout: the limit of the store's `get`.
        given: the flag or variable that names the port.

    Raises:
        ConfigError: the port can't be had.
    """
    listener = _listen(host, port, given)
    port = listener.getsockname()[1]
    store = TCPStore(
        host or "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.fileno(),
    )
    listener.detach()  # the store's own from now on
    return store


def connect_tcp(host: str, port: int, timeout: timedelta) -> TCPStore:
    """Open the store that somebody serves at `host` and `port`.

    Raises:
        ConfigError: the host's name isn't known.
        CommError: nobody serves a store there (yet).
    """
    try:
        _knock(host, port)
        return TCPStore(host, port, is_master=False, timeout=timeout)
    except socket.gaierror as error:
        raise ConfigError(
            f"{host}:{port}: the name {host} isn't known here; give an address, or a name that "
            "this machine can look up."
        ) from error
    except (DistError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise CommError(f"{host}:{port} can't be reached: {reason or _SILENT}.") from error


def split_address(address: str) -> tuple[str, int]:
    """Read HOST:PORT.

    Raises:
        ConfigError: it is something else.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"--master {address}: give it as HOST:PORT, such as node0:29500.")
    return host.strip("[]"), int(port)


def _knock(host: str, port: int) -> None:
    """See that a store answers.

    Raises:
        OSError: somebody else does, or nobody.
    """
    word = secrets.token_bytes(4)
    with socket.create_connection((host, port), timeout=_CONNECT_S) as connection:
        connection.settimeout(_ANSWER_S)
        connection.sendall(_VALIDATE + _PING + word)
        if connection.recv(len(word), socket.MSG_WAITALL) != word:
            raise OSError(errno.EPROTO, _SILENT)


def _listen(host: str, port: int, given: str) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"{given}: port {port} can't be had on this machine ({error.strerror}): another run "
            "may be using it; choose another port."
        ) from error
    return listener
