"""Ports for servers that a test starts a moment later, while other tests run beside it.

They lie below those that Linux gives away by itself, to connections and to binds of port 0.
No process takes one twice, and none that another process of tests has taken: an abstract socket
named after the port guards it until the process ends. So no other process has it before the server.
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
        guard = socket.socket(socket.AF_UNIX)
        with socket.socket() as probe:
            try:
                guard.bind(f"\0paceline-tests-port-{port}")
                probe.bind(("127.0.0.1", port))
            except OSError:
                guard.close()
                continue
        guard.detach()  # the name is this process's until its end
        yield port


_PORTS = _free()
