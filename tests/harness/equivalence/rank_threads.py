"""Runs a function on several ranks that are threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from paceline.comm.communicator import Communicator
from tests.harness.twins.communicator import ThreadGroup

T = TypeVar("T")


def run_ranks(world_size: int, function: Callable[[Communicator], T]) -> list[T]:
    """Return each rank's result; the first error of any rank is raised."""
    group = ThreadGroup(world_size)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(group.communicator(rank))
        except BaseException as error:
            errors.append(error)
            group.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(world_size)]
