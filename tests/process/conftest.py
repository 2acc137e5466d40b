"""What the tests of processes share."""

from __future__ import annotations

import subprocess

import pytest

from tests.harness.processes.fork_server import ServedPopen


@pytest.fixture(autouse=True)
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the fork server start the Python programs that code in this process starts."""
    monkeypatch.setattr(subprocess, "Popen", ServedPopen)
