"""Ports for servers that a test starts a moment later, while other tests run beside it.

They lie below those that Linux gives away by itself, to connections and to whoever binds port 0,
and no process takes one twice: nobody has them before the server does.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator

RANGE = range(12_000, 32_000)


def free_port() -> int:
    """Return a port that nobody listens at."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Return several that differ."""
    return [next(_PORTS) for _ in range(count)]


def _free() -> Iterator[int]:
    ports = list(RANGE)
    random.Random(os.getpid()).shuffle(ports)  # other processes test too
    for port in ports:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        yield port


_PORTS = _free()
