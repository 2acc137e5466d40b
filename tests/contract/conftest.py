"""Fixtures that several suites take."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.harness.data.databases import cache, engine, folder

__all__ = ["cache", "engine", "folder", "one_core"]


@pytest.fixture(autouse=True)
def one_core() -> Iterator[None]:
    """Run a test's threads on one core: most are small trainings on ranks as threads.

    The ranks wait for each other and for the interpreter's lock; handing both over between cores
    takes as much processor time as the training. Each process of xdist has another core.
    """
    cores = os.sched_getaffinity(0)
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.sched_setaffinity(0, {sorted(cores)[number % len(cores)]})
    yield
    os.sched_setaffinity(0, cores)
