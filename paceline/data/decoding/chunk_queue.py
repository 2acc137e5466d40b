"""Queue of chunks of records, in memory that the decode processes of a run share.

    submit ──▶ │ chunk │ chunk │ chunk │ … ──▶ take ──▶ decoded into its buffer ──▶ finish

The state of a chunk is one number, its owner, and one store changes it, under a lock that a killed
process releases. So a process may be killed at any instruction: its chunk is either still free, or
its own, in which case `put_back` frees it, or finished.

    WAITING   0            submitted, not taken
    owner     worker + 1   a worker decodes it
    FINISHED  -1           decoded, or withdrawn; the slot is free

Two event descriptors wake those that wait: a semaphore of chunks to take, whose count may be too
high (a withdrawn chunk) but never too low, and a signal that a buffer has become complete.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt

from paceline.data.decoding.process_lock import ProcessLock

MAX_WORKERS = 256
_SLOTS = 8192  # chunks that are submitted and not finished, at most
_WAITING = 0
_FINISHED = -1
# Fields of the header: where to look for a waiting chunk; its end; whether all must end.
_HEAD = 0
_TAIL = 1
_STOPPED = 2
_HEADER = 8
_AT, _SAMPLES, _BUSY, _RUNNABLE, _LAST, _RETIRED, _REACHED = range(7)  # a worker's row
_WORKER = 8  # cells of a worker's row
_CHUNK = 10  # of a chunk's
_CELLS = _HEADER + MAX_WORKERS * _WORKER + _SLOTS * (_CHUNK + 2)

Cells = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Chunk: some records of a batch, and where their samples go.

    Attributes:
        serial: number of the batch, never used twice.
        maker: number of the sample maker.
        epoch: decides with the records' numbers what is random.
        offset: where the batch's buffer begins in the shared memory, in bytes.
        count: number of samples of the buffer.
        begin: the chunk's first sample in the buffer.
        end: the sample after its last one.
        first: the first slot of the buffer's chunks, in the queue.
        last: the slot after their last one.
    """

    serial: int
    maker: int
    epoch: int
    offset: int
    count: int
    begin: int
    end: int
    first: int = 0
    last: int = 0
    slot: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTimes:
    """Sums over workers.

    Attributes:
        samples: samples made.
        busy: seconds spent on them.
        runnable: seconds of these in which the worker wasn't blocked by the disk.
    """

    samples: int
    busy: float
    runnable: float

    def since(self, earlier: WorkerTimes) -> WorkerTimes:
        """Return the difference."""
        return WorkerTimes(
            samples=self.samples - earlier.samples,
            busy=self.busy - earlier.busy,
            runnable=self.runnable - earlier.runnable,
        )


NOTHING_MADE = WorkerTimes(samples=0, busy=0.0, runnable=0.0)


class ChunkQueue:
    """Queue of chunks: one process submits, workers take and finish.

    Args:
        memory: descriptor of the queue's memory, a memfd.
        chunks: descriptor of the semaphore of chunks to take, an eventfd.
        complete: descriptor of the signal that a buffer is complete, an eventfd.
        submits: whether this process submits; it kills a stopped process that has the lock.
    """

    def __init__(self, memory: int, chunks: int, complete: int, *, submits: bool) -> None:
        self.descriptors = (memory, chunks, complete)
        self._chunks = chunks
        self._complete = complete
        self._lock = ProcessLock(memory, kills=submits)
        size = 8 * _CELLS
        if submits:
            os.ftruncate(memory, size)
        memory_map = mmap.mmap(memory, size)
        cells = np.frombuffer(memory_map, np.int64)
        workers, owners, since, rows = np.split(
            cells[_HEADER:],
            np.cumsum([MAX_WORKERS * _WORKER, _SLOTS, _SLOTS]),
        )
        self._header: memoryview = memoryview(memory_map).cast("B")[: 8 * _HEADER].cast("q")
        self._workers: Cells = workers.reshape(MAX_WORKERS, _WORKER)
        self._owners: Cells = owners
        self._since: Cells = since  # (slots,) ns of the monotonic clock at which it was taken
        self._rows: Cells = rows.reshape(_SLOTS, _CHUNK)
        if submits:
            self._owners[:] = _FINISHED

    @classmethod
    def create(cls) -> ChunkQueue:
        """Make the queue of a process that submits."""
        return cls(
            os.memfd_create("paceline-chunks", os.MFD_CLOEXEC),
            os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE),
            os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK),
            submits=True,
        )

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in self.descriptors:
            os.close(descriptor)

    # The process that submits.

    def submit(self, chunks: Sequence[Chunk]) -> range:
        """Add the chunks of a buffer; return their slots."""
        rows = np.array([astuple(chunk) for chunk in chunks], np.int64).reshape(-1, _CHUNK)
        with self._lock:
            position = self._free(len(chunks))
            first = position % _SLOTS
            slots = range(first, first + len(chunks))
            rows[:, -3:-1] = slots.start, slots.stop
            rows[:, -1] = slots
            self._rows[slots.start : slots.stop] = rows
            self._owners[slots.start : slots.stop] = _WAITING
            self._header[_TAIL] = position + len(chunks)
        self._wake(len(chunks))
        return slots

    def is_complete(self, slots: range) -> bool:
        """Return whether no chunk of a buffer is waiting or in work."""
        return bool((self._owners[slots.start : slots.stop] == _FINISHED).all())

    def withdraw(self, slots: range) -> None:
        """Remove a buffer's chunks that no worker has taken."""
        with self._lock:
            owners = self._owners[slots.start : slots.stop]
            owners[owners == _WAITING] = _FINISHED

    def put_back(self, worker: int) -> list[tuple[Chunk, int]]:
        """Let other workers take what a worker that has ended had in work.

        Returns:
            Its chunks (one at most), each with the sample in it at which the worker was.
        """
        with self._lock:
            slots = np.flatnonzero(self._owners == worker + 1).tolist()
            held = [(self._chunk(slot), int(self._workers[worker, _AT])) for slot in slots]
            tail = self._header[_TAIL]
            for slot in slots:
                self._owners[slot] = _WAITING
                position = tail - 1 - (tail - 1 - slot) % _SLOTS
                self._header[_HEAD] = min(self._header[_HEAD], position)
            # The worker may have ended between a look at the semaphore and at the queue.
            waiting = int((self._owners == _WAITING).sum())
        self._wake(waiting)
        return held

    def overdue(self, slots: range, seconds: float) -> dict[int, int]:
        """Find the workers that have had one sample in work for long, while others finish theirs.

        Returns:
            The samples in their buffers, by worker.
        """
        now = time.monotonic_ns()
        late = {}
        for slot in slots:
            worker = int(self._owners[slot]) - 1
            if worker < 0:
                continue
            reached = int(self._workers[worker, _REACHED])
            others = np.delete(self._workers[:, _LAST], worker)
            if now - reached > seconds * 1e9 and others.max() > reached:
                late[worker] = int(self._workers[worker, _AT])
        return late

    def times(self) -> WorkerTimes:
        """Sum what all workers have made so far."""
        samples, busy, runnable = self._workers[:, _SAMPLES : _RUNNABLE + 1].sum(axis=0).tolist()
        return WorkerTimes(samples=samples, busy=busy / 1e9, runnable=runnable / 1e9)

    def stop(self, workers: int) -> None:
        """Let all workers end after the chunk that they have in work."""
        self._header[_STOPPED] = 1
        self._wake(workers)

    def retire(self, worker: int) -> None:
        """Let one worker end in place of taking its next chunk."""
        self._workers[worker, _RETIRED] = 1

    # A worker.

    def take(self, worker: int) -> Chunk | None:
        """Wait for a chunk and take it; None: the worker must end."""
        while True:
            os.eventfd_read(self._chunks)
            if self._header[_STOPPED] or self._workers[worker, _RETIRED]:
                # The semaphore must never be too low, or a chunk would wait for ever.
                self._wake(1)  # for the chunk that it doesn't take
                return None
            with self._lock:
                position = self._waiting_position()
                if position is not None:
                    slot = position % _SLOTS
                    chunk = self._chunk(slot)
                    self.reach(worker, chunk.begin)
                    self._since[slot] = time.monotonic_ns()
                    # After the note of where it begins: if this
                    # process is killed now, `put_back` reads that.
                    self._owners[slot] = worker + 1
                    # The lock makes this one change with the line before; a process that is killed
                    # between them leaves a head that is too low, from which the next look begins.
                    self._header[_HEAD] = position + 1
                    return chunk

    def reach(self, worker: int, sample: int) -> None:
        """Note at which sample of its chunk a worker is, and since when."""
        self._workers[worker, _AT] = sample
        self._workers[worker, _REACHED] = time.monotonic_ns()

    def finish(self, worker: int, chunk: Chunk, runnable: int) -> None:
        """Finish a worker's chunk, for which it was runnable for `runnable` ns."""
        now = time.monotonic_ns()
        row = self._workers[worker]
        row[_SAMPLES] += chunk.end - chunk.begin
        row[_BUSY] += now - self._since[chunk.slot]
        row[_RUNNABLE] += runnable
        with self._lock:
            if self._owners[chunk.slot] != worker + 1:
                return  # this process was taken for dead
            row[_LAST] = now
            self._owners[chunk.slot] = _FINISHED
            complete = self.is_complete(range(chunk.first, chunk.last))
        if complete:
            os.eventfd_write(self._complete, 1)

    def _free(self, count: int) -> int:
        """Find slots in a row for chunks, from the tail on; return the first one's position."""
        tail = self._header[_TAIL]
        for first in range(tail, tail + _SLOTS):
            begin = first % _SLOTS
            # A buffer's chunks lie together, so that one look shows whether it is complete.
            if begin + count <= _SLOTS and self.is_complete(range(begin, begin + count)):
                return first
        raise AssertionError(f"the queue of {_SLOTS} chunks has no room for {count} more")

    def _waiting_position(self) -> int | None:
        """Find the first chunk that waits."""
        head = self._header[_HEAD]
        tail = self._header[_TAIL]
        for position in range(head, tail):
            if self._owners[position % _SLOTS] == _WAITING:
                return position
        self._header[_HEAD] = tail
        return None

    def _chunk(self, slot: int) -> Chunk:
        return Chunk(*self._rows[slot].tolist())

    def _wake(self, count: int) -> None:
        if count:
            os.eventfd_write(self._chunks, count)
