"""Supervisor of the decode processes of a run, of training and evaluation together.

    loaders ──begin──▶ queue of chunks ──▶ decode processes (or one thread) ──▶ buffers ──▶ loaders

A decode process that is killed is replaced, and its chunk is made again; so is one that is stopped
while others work. All happens in the caller's thread, when a batch is begun or waited for: nothing
here competes with the training step for the interpreter's lock.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from paceline.data.decoding.chunk_queue import NOTHING_MADE, Chunk, ChunkQueue
from paceline.data.decoding.decode_chunks import NO_RECORD, Maker, Report, decode_chunks
from paceline.data.decoding.ring import BatchBuffer, CopyEvent, Ring
from paceline.data.decoding.server_process import Ended, ServerProcess
from paceline.data.decoding.worker_count import WorkerCount
from paceline.data.order import Indices
from paceline.errors import DataError, many
from paceline.recorder import NullRecorder, Recorder

_CHUNK = 4  # records: few enough to share out evenly, more than a chunk's own cost
_CHUNKS = 512  # of a buffer, at most
_THREAD = 0  # the worker that is a thread of this process; decode processes count from 1
_LOOK_S = 1.0  # between two looks at processes that may be stopped
_STOPPED_S = 5.0  # that a worker may have one sample in work, while others finish theirs
# A process may be killed for another's memory: only a record at which several die is to blame.
_DEATHS = 3  # of decode processes at one record, until it is named
_STARTS = 5  # of a decode process while none makes a sample, one after another
_STOPPED = "Tt"  # states of a process that a signal or a tracer has stopped
_BLOCKED = 0.5  # share of decoding spent on waits for the disk that names it as the reason
_CLOSE_S = 2.0  # Ctrl-C must end a run within five


@dataclass
class DecodeDevice:
    """Where a run's images are decoded now.

    Attributes:
        name: "cpu" or "cuda".
        measured: whether `--decode_device auto` chooses it.
    """

    name: str
    measured: bool = False


@dataclass(eq=False)
class Work:
    """Samples under construction.

    Attributes:
        serial: a number that no other work of the pool has.
        maker: the sample maker's number.
        buffer: the buffer that they are written to.
        slots: its chunks' slots in the queue.
        bad: what is wrong with its bad records, by number.
    """

    serial: int
    maker: int
    buffer: BatchBuffer
    slots: range
    bad: dict[int, DataError] = field(default_factory=dict)

    @property
    def records(self) -> Indices:
        """The records' numbers, shape (n,)."""
        return self.buffer.records


class DecodePool:
    """Decode processes, the queue from which they take chunks, and the buffers that they fill.

    Args:
        workers: number of decode processes; 0: a thread of this process decodes; None: a measured
            number (`WorkerCount`).
        cuda: whether batches go to a GPU.
        limit: number of decode processes for which there are cores.
        device: where images are decoded; on a GPU, the processes only read them.
        thread: whether a thread of this process decodes beside decode processes.
        alone: the option with which the process of the pool decodes by itself, for messages.
        recorder: receives notes for the user.
        process: what the notes call this process, such as "Rank 3".
        stopped_after: seconds that one sample may take without processor time, while others are
            finished.
    """

    def __init__(
        self,
        workers: int | None,
        *,
        cuda: bool = False,
        limit: int = 0,
        device: DecodeDevice | None = None,
        thread: bool = False,
        alone: str = "--decode_workers 0",
        recorder: Recorder | None = None,
        process: str = "",
        stopped_after: float = _STOPPED_S,
    ) -> None:
        self.workers = workers or 0
        self._limit = limit
        self._device = device or DecodeDevice("cpu")
        self._alone = alone
        self._with_thread = thread or not workers
        self._count = WorkerCount(limit) if workers is None else None
        self._before = NOTHING_MADE  # the present epoch
        self._recorder = recorder or NullRecorder()
        self._process_name = process
        self._stopped_after = stopped_after
        self._cuda = cuda
        self._makers: list[Maker] = []
        self._closed = False
        self._serial = 0
        self._works: dict[int, Work] = {}  # by serial number
        self._dropped: list[Work] = []  # whose chunks in work haven't ended
        self._queue = ChunkQueue.create()
        self._ring = Ring(cuda=cuda)
        self._reports, self._reported = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._reported.setblocking(False)
        self._thread: threading.Thread | None = None
        self._server: ServerProcess | None = None
        self._next_look = 0.0
        self._deaths: Counter[tuple[int, int]] = Counter()  # by maker and record
        self._failure: DataError | None = None  # no worker can continue
        self._late: set[tuple[int, int]] = set()  # maker and record that a process was killed at
        self._killed: set[int] = set()  # processes that this one killed
        self._used: dict[int, int] = {}  # processor time of late processes at the last look
        self._starts: Counter[int] = Counter()  # by worker, since one made a sample
        self._made: dict[int, int] = {}  # samples of all workers when each was last started

    def add(self, maker: Maker) -> int:
        """Add a sample maker, before the first batch is begun; return its number."""
        assert self._serial == 0, "decode processes know the makers that there are when they start"
        self._makers.append(maker)
        return len(self._makers) - 1

    def begin(self, maker: int, epoch: int, records: Indices) -> Work:
        """Begin to make samples.

        Args:
            maker: the sample maker's number.
            epoch: decides with the records' numbers what is random.
            records: the records' numbers, shape (n,).

        Raises:
            DataError: CUDA can't pin the samples' memory, or release another's.
            MemoryError: there is no memory for the samples.
        """
        if self._thread is None and self._server is None:
            self._start()
        self._reuse_dropped()
        made_by = self._makers[maker]
        count = len(records)
        buffer = self._ring.take(count, made_by.sample_bytes, pinned=made_by.pinned)
        buffer.records[:] = records
        self._serial += 1
        # The queue has a limited number of slots for all buffers together.
        size = max(_CHUNK, -(-count // _CHUNKS))
        chunks = [
            Chunk(self._serial, maker, epoch, buffer.offset, count, at, min(at + size, count))
            for at in range(0, count, size)
        ]
        work = Work(self._serial, maker, buffer, self._queue.submit(chunks))
        self._works[work.serial] = work
        return work

    def wait(self, works: Iterable[Work], timeout: float) -> bool:
        """Wait until samples are made; return whether they are, within `timeout` seconds.

        Raises:
            DataError: decode processes die again and again, or can't go on.
        """
        waited = list(works)
        deadline = time.monotonic() + timeout
        self._attend(waited)
        while waited := [work for work in waited if not self._queue.is_complete(work.slots)]:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._await_event(min(_LOOK_S, left))
            self._attend(waited)
        # The report of a bad record comes before its chunk is finished, so none is missed here.
        self._receive_reports()  # sent before the chunks were finished
        return True

    def is_made(self, work: Work) -> bool:
        """Return whether samples are made, or were given up; any thread may ask."""
        return self._queue.is_complete(work.slots)

    def release(self, work: Work, copied: CopyEvent | None = None) -> None:
        """Give samples up: what is in work ends, the rest isn't begun.

        Args:
            work: the samples.
            copied: the event after which the device has read them; None: nothing reads them.

        Raises:
            DataError: CUDA can't release the memory of buffers that aren't needed any more.
        """
        del self._works[work.serial]
        if self._queue.is_complete(work.slots):
            self._ring.free(work.buffer, copied)
        else:
            self._queue.withdraw(work.slots)
            self._dropped.append(work)

    def batch_made(self, samples: int, waited: float) -> None:
        """Measure: a batch of `samples` was taken after a wait of `waited` seconds."""
        if self._count is None:
            return
        wanted = self._count.batch(samples, waited, self._queue.times(), self.workers)
        if wanted is not None:
            self._note(self._count.reason)
            self._grow(wanted)

    def remedy(self) -> str:
        """Return what shortens the waits for batches, by what was measured since the last call."""
        times = self._queue.times()
        made = times.since(self._before)
        self._before = times
        blocked = 1 - made.runnable / made.busy if made.busy else 0.0
        if blocked > _BLOCKED:
            return (
                f"decoding waited for the disk {blocked:.0%} of its time; copy the database to a "
                "faster disk, or to memory."
            )
        smaller = "store smaller images with paceline db create --resize N."
        if self._device.name == "cuda":
            if self._device.measured:
                return f"the GPU decodes, which is faster here than the CPU; {smaller}"
            return f"the GPU decodes; use --decode_device cpu if cores are free, or {smaller}"
        if self.workers < self._limit:
            return f"use --decode_workers {self._limit} in place of {self.workers}."
        cores = "no core is left for more decode processes"
        if self._cuda and not self._device.measured:
            return f"{cores}; use --decode_device auto to decode on the GPU, or {smaller}"
        return f"{cores}; {smaller}"

    def close(self) -> None:
        """End thread and processes; a read that hangs is abandoned after two seconds.

        Processes are killed then, which takes another second at most.
        """
        if self._closed:
            return
        self._closed = True
        self._queue.stop(self.workers + 1)
        self._receive_reports()  # a worker may wait for room to send one
        deadline = time.monotonic() + _CLOSE_S
        ended = True
        if self._thread is not None:
            self._thread.join(_CLOSE_S)
            ended = not self._thread.is_alive()
        if self._server is not None:
            self._server.close(max(0.0, deadline - time.monotonic()))
        self._works.clear()
        self._reports.close()
        self._reported.close()
        if ended:  # a thread that hangs keeps its memory
            self._ring.close()
            self._queue.close()

    def _start(self) -> None:
        if self.workers:
            self._grow(self.workers)
        if not self._with_thread:
            return
        self._thread = threading.Thread(
            target=decode_chunks,
            args=(_THREAD, self._queue, self._ring, self._reports, self._makers),
            name="paceline-decode",
            daemon=True,
        )
        self._thread.start()

    def _grow(self, workers: int) -> None:
        """Let there be so many decode processes."""
        running = self.workers if self._server is not None else 0
        self.workers = workers
        if self._server is None:
            self._server = self._new_server()
        for worker in range(running + 1, workers + 1):
            self._start_process(self._server, worker)
        if self._thread is not None and self._cuda:
            # It would contend with the step for the interpreter's lock.
            self._queue.retire(_THREAD)

    def _start_process(self, server: ServerProcess, worker: int) -> None:
        self._made[worker] = self._queue.times().samples
        server.start(worker)

    def _new_server(self) -> ServerProcess:
        return ServerProcess(self._queue, self._ring.descriptor, self._reports, self._makers)

    def _await_event(self, seconds: float) -> None:
        """Wait for a complete buffer, a report, or the end of a process."""
        _, _, complete = self._queue.descriptors
        readable: list[int | socket.socket] = [complete, self._reported]
        if self._server is not None:
            readable.append(self._server.socket)
        poll = select.poll()
        for each in readable:
            poll.register(each, select.POLLIN)
        poll.poll(max(0, 1000 * seconds))
        with suppress(BlockingIOError):
            os.eventfd_read(complete)

    def _attend(self, waited: Sequence[Work]) -> None:
        """Receive reports, and replace processes that have ended or are stopped.

        Raises:
            DataError: decode processes die again and again, or can't go on.
        """
        self._receive_reports()
        if self._failure is not None:
            raise self._failure
        if self._server is None:
            return
        now = time.monotonic()
        # Each look reads a file of /proc for each process.
        if now >= self._next_look:
            self._next_look = now + _LOOK_S
            self._kill_stopped(self._server, waited)
        ended = self._server.ended()
        if self._server.has_ended:
            self._server.socket.close()
            self._server = self._new_server()
        for each in ended:
            self._replace(self._server, each)

    def _receive_reports(self) -> None:
        with suppress(BlockingIOError):
            while True:
                report = Report(*json.loads(self._reported.recv(1 << 16)))
                if report.record == NO_RECORD:
                    self._failure = DataError(report.text)
                elif report.serial in self._works:
                    self._works[report.serial].bad[report.record] = DataError(report.text)

    def _replace(self, server: ServerProcess, ended: Ended) -> None:
        """Start another process in place of one that has ended, and make its chunk again.

        Raises:
            DataError: three have died at one record, or one has ended five times in a row.
        """
        ours = ended.process in self._killed
        self._killed.discard(ended.process)
        again = "it is replaced"
        for chunk, sample in self._queue.put_back(ended.worker):
            again = f"it is replaced, and its {many(chunk.end - chunk.begin, 'image')} made again"
            if chunk.serial in self._works and ended.status is not None and not ours:
                record = int(self._works[chunk.serial].buffer.records[sample])
                self._count_death(chunk.maker, record, ended)
        killed = ended.status is None or ended.status < 0
        if killed and self._queue.times().samples > self._made[ended.worker]:
            self._starts[ended.worker] = 0
        self._starts[ended.worker] += 1
        if self._starts[ended.worker] >= _STARTS:
            raise DataError(
                f"Decode process {ended.worker} was started {_STARTS} times and has ended each "
                f"time; the last one {ended}. Free memory, or use {self._alone}: this process then "
                "decodes by itself, and shows the reason."
            )
        known = f" (pid {ended.process})" if ended.process else ""
        self._note(f"Decode process {ended.worker}{known} {ended}; {again}.")
        self._start_process(server, ended.worker)

    def _note(self, text: str) -> None:
        process = f"{self._process_name}: " if self._process_name else ""
        self._recorder.event("note", text=f"{process}{text}")

    def _count_death(self, maker: int, record: int, ended: Ended) -> None:
        """Count the death of a process that decoded a record.

        Raises:
            DataError: it is the third at this record.
        """
        self._deaths[maker, record] += 1
        if self._deaths[maker, record] >= _DEATHS:
            raise DataError(
                f"{_DEATHS} decode processes have died while they decoded "
                f"{self._makers[maker].name(record)}; the last one {ended}. Its image takes "
                "too much memory, or the decoder fails: repair or remove it."
            )

    def _kill_stopped(self, server: ServerProcess, waited: Sequence[Work]) -> None:
        """Kill processes that a signal has stopped, or that do nothing while others work."""
        state = _state(server.process.pid)
        if state is not None and state[0] in _STOPPED:
            server.process.kill()  # it reports no end, and starts nothing
            return
        late = {
            worker: (work.maker, int(work.records[sample]))
            for work in waited
            for worker, sample in self._queue.overdue(work.slots, self._stopped_after).items()
        }
        used = {}
        for worker, process in server.processes.items():
            state = _state(process)
            if state is None:
                continue
            if worker in late:
                used[process] = state[1]
            # A sample that takes long is no reason: a process that computes is left alone. So is
            # the second process at a record, which may have to wait for its disk as long.
            hangs = used.get(process, -1) == self._used.get(process)
            if hangs and late[worker] not in self._late:
                self._late.add(late[worker])
            elif state[0] not in _STOPPED:
                continue
            self._killed.add(process)
            self._note(f"Decode process {worker} (pid {process}) makes nothing, and is killed.")
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._used = used

    def _reuse_dropped(self) -> None:
        for work in list(self._dropped):
            if self._queue.is_complete(work.slots):
                self._dropped.remove(work)
                self._ring.free(work.buffer)


def _state(process: int) -> tuple[str, int] | None:
    """Read a process's state, a letter, and the clock ticks that it has computed; None: it ended.

    See proc(5), /proc/[pid]/stat.
    """
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[11]) + int(fields[12])
