"""Run a function over many items in decode processes, and hand out its results in their order.

    items     … 9 8 | 7 6 5 4 | 3 2 1 0 …     results
          not begun | in buffers | handed out

A thread of this process begins at once, while the processes start; few items need no others. Memory
is bounded by the buffers in flight.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, TypeVar

import numpy as np

from paceline.data.decoding.chunk_queue import MAX_WORKERS
from paceline.data.decoding.decode_pool import DecodePool, Work
from paceline.data.decoding.usable_cores import usable_cores
from paceline.data.order import Indices
from paceline.data.source import Pixels
from paceline.errors import DataError

Item = TypeVar("Item")
Result = TypeVar("Result")

Meter = Callable[[int, int], None]
"""Receives the progress of a long job: (done, total)."""

_FEW = 200  # items that one thread has made before a process would have begun
_ITEMS = 16  # items a worker, in all batches of which
_BATCHES = 3
_LONGEST = 2**26  # bytes of a result in a buffer, where only what is written takes memory
_LENGTH = 8  # bytes before a result
_LIMIT_S = 600.0  # for a batch's items


@dataclass(frozen=True)
class _ItemMaker:
    """Writes results, pickled for this very program, after their length; 0: one is too long."""

    function: Callable[[Any], Any]
    items: Sequence[Any]
    noun: str
    pinned: ClassVar[bool] = False
    sample_bytes: ClassVar[int] = _LENGTH + _LONGEST

    def numbers(self, epoch: int, records: Indices) -> list[list[float]]:
        return [[]] * len(records)

    def write(self, index: int, numbers: list[float], out: Pixels) -> int:
        result = pickle.dumps(self.function(self.items[index]), pickle.HIGHEST_PROTOCOL)
        fits = len(result) <= _LONGEST
        out[:_LENGTH].view(np.int64)[0] = len(result) if fits else 0
        if fits:
            out[_LENGTH : _LENGTH + len(result)] = np.frombuffer(result, np.uint8)
        return 0

    def read(self, index: int, out: Pixels) -> Any:
        """Return a result."""
        length = int(out[:_LENGTH].view(np.int64)[0])
        if not length:
            # A result that fits in no buffer is made once more, in this process.
            return self.function(self.items[index])
        return pickle.loads(out[_LENGTH : _LENGTH + length].data)

    def name(self, index: int) -> str:
        return f"{self.noun} {self.items[index]}"

    def close(self) -> None:
        """Close nothing: a process's end does."""


def ordered_map(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    noun: str,
    workers: int,
    meter: Meter,
) -> Generator[Result, None, None]:
    """Yield `function(item)` for each item in order.

    `close()` it to stop early: items that haven't begun are dropped.

    Args:
        function: can be pickled, and so can the items and its results.
        items: its arguments.
        noun: what an item is, for errors.
        workers: number of processes, of which this one's thread is one: at most MAX_WORKERS; 0 is
            one a core. Few items take this one alone.
        meter: is called after each result has been dealt with.

    Raises:
        DataError: the function has raised an error, or ended its process again and again, there
            isn't enough memory, or a disk doesn't respond.
    """
    workers = min(workers or usable_cores(), MAX_WORKERS)
    processes = workers - 1 if len(items) >= _FEW else 0
    maker = _ItemMaker(function, items, noun)
    pool = DecodePool(processes, thread=True, alone="--workers 1")
    number = pool.add(maker)
    size = _ITEMS * workers // _BATCHES + 1
    batches = (np.arange(at, min(at + size, len(items))) for at in range(0, len(items), size))
    done = 0
    try:
        begun = deque(_begin(pool, number, batches, _BATCHES))
        while begun:
            work = begun.popleft()
            if not pool.wait([work], _LIMIT_S):
                raise DataError(
                    f"{maker.name(int(work.records[0]))}, or one soon after it, wasn't read within "
                    f"{_LIMIT_S:g} s: the disk or network doesn't respond; repair it, and start "
                    "the command again."
                )
            for at, record in enumerate(work.records.tolist()):
                if record in work.bad:
                    raise work.bad[record]
                yield maker.read(record, work.buffer.samples[at])
                done += 1
                meter(done, len(items))
            pool.release(work)
            begun.extend(_begin(pool, number, batches, 1))
    finally:
        pool.close()


def _begin(pool: DecodePool, maker: int, batches: Iterator[Indices], count: int) -> list[Work]:
    """Begin the next batches.

    Raises:
        DataError: there is no memory for one.
    """
    try:
        return [pool.begin(maker, 0, records) for records in islice(batches, count)]
    except MemoryError as error:
        raise DataError(f"{error}: free memory, or use fewer processes (--workers N).") from error
