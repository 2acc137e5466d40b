"""Runs a function on several ranks that are threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from paceline.comm.communicator import Communicator
from paceline.parallel import whole_norm
from tests.harness.twins.communicator import ThreadGroup

T = TypeVar("T")


class _OfThisRank(WeakKeyDictionary[Any, Any]):
    """Parts of models that this thread has divided, or the main thread.

    A process has one rank, so that clipping may look at all parts. Here it would read gradients
    that another rank's backward writes without the interpreter's lock, which is a SIGSEGV.
    """

    def __init__(self) -> None:
        super().__init__()
        self._threads: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def setdefault(self, key: Any, default: Any = None) -> Any:
        self._threads.setdefault(key, threading.get_ident())
        return super().setdefault(key, default)

    def items(self) -> Iterator[tuple[Any, Any]]:
        known = (threading.get_ident(), threading.main_thread().ident)
        return iter([(k, v) for k, v in super().items() if self._threads.get(k) in known])


whole_norm._divided = _OfThisRank()


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
