"""Run a function over many items in threads, and hand out its results in the items' order.

Reading files, decoding and encoding release the interpreter's lock, so threads use all cores; and
they end with their process, however that ends. Memory is bounded by a window of items in flight:

    items     … 9 8 | 7 6 5 4 | 3 2 1 0 …     results
          not taken | in flight | handed out
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

Meter = Callable[[int, int], None]
"""Receives the progress of a long job: (done, total)."""

_IN_FLIGHT = 4  # items a thread: enough that a slow item doesn't make the others idle


def ordered_map(
    function: Callable[[Item], Result], items: Sequence[Item], *, workers: int, meter: Meter
) -> Generator[Result, None, None]:
    """Yield `function(item)` for each item in order.

    `close()` it to stop early: items that haven't begun are dropped.

    Args:
        function: is called in several threads at once; what it raises is raised here.
        items: its arguments.
        workers: number of threads; 0 is one a core.
        meter: is called after each result has been dealt with.
    """
    threads = workers or len(os.sched_getaffinity(0))
    pool = ThreadPoolExecutor(threads, thread_name_prefix="paceline-images")
    window: deque[Future[Result]] = deque()
    ahead = iter(items)
    try:
        for done in range(1, len(items) + 1):
            for item in islice(ahead, _IN_FLIGHT * threads - len(window)):
                window.append(pool.submit(function, item))
            yield window.popleft().result()
            meter(done, len(items))
    finally:
        pool.shutdown(cancel_futures=True)
