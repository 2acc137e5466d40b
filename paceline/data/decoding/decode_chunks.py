"""The loop of a decode process: take a chunk, make its samples in their room, finish it.

The automatic number of decode processes, and --decode_workers 0, run the same loop in a thread of
the training process.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.data.decoding.chunk_queue import Chunk, ChunkQueue
from paceline.data.decoding.maker import Maker
from paceline.data.decoding.ring import MappedRooms, Ring
from paceline.errors import DataError

_LONGEST = 16_000  # characters of a report: a packet of a local socket has room for it


@dataclass(frozen=True)
class BadRecord:
    """Report that a record gives no sample.

    Attributes:
        serial: number of the batch.
        record: the record's number.
        text: what is wrong with it.
    """

    serial: int
    record: int
    text: str

    def pack(self) -> bytes:
        """Return the report as a packet."""
        return json.dumps([self.serial, self.record, self.text[:_LONGEST]]).encode()

    @classmethod
    def unpack(cls, packet: bytes) -> BadRecord:
        """Read a packet."""
        return cls(*json.loads(packet))


def decode_chunks(
    worker: int,
    queue: ChunkQueue,
    rooms: Ring | MappedRooms,
    reports: socket.socket,
    makers: Sequence[Maker],
) -> None:
    """Make samples until the queue says that this worker ends.

    Args:
        worker: the worker's number.
        queue: the queue of chunks.
        rooms: the rooms of the batches.
        reports: receives a packet for each record that gives no sample.
        makers: the sample makers, by number.
    """
    clock = RunnableClock()
    while chunk := queue.take(worker):
        begun = clock.ns()
        for report in _make(worker, queue, rooms, chunk, makers[chunk.maker]):
            reports.send(report.pack())
        queue.finish(worker, chunk, clock.ns() - begun)
    clock.close()


class RunnableClock:
    """Clock of the time in which the calling thread computed or waited for a core.

    The rest of the time it was blocked, which for a decoder means: by the disk. A thread's
    processor time alone would take a busy machine for a slow disk.
    """

    def __init__(self) -> None:
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # a kernel without scheduler statistics
            self._file = -1

    def ns(self) -> int:
        """Return nanoseconds since an arbitrary origin."""
        if self._file < 0:
            return time.thread_time_ns()
        computed, waited, _ = os.pread(self._file, 64, 0).split()
        return int(computed) + int(waited)

    def close(self) -> None:
        """Close the kernel's file."""
        if self._file >= 0:
            os.close(self._file)


def _make(
    worker: int, queue: ChunkQueue, rooms: Ring | MappedRooms, chunk: Chunk, maker: Maker
) -> list[BadRecord]:
    """Make a chunk's samples; return the reports of bad records."""
    room = rooms.room(chunk.offset, chunk.count, maker.sample_bytes)
    records = room.records[chunk.begin : chunk.end]
    numbers = maker.numbers(chunk.epoch, records)
    bad = []
    for at, record in enumerate(records.tolist()):
        sample = chunk.begin + at
        queue.reach(worker, sample)
        try:
            room.labels[sample] = maker.write(record, numbers[at], room.samples[sample])
        except DataError as error:
            bad.append(BadRecord(chunk.serial, record, str(error)))
        except Exception as error:
            bad.append(BadRecord(chunk.serial, record, _sentence(maker.name(record), error)))
    return bad


def _sentence(name: str, error: Exception) -> str:
    """Say what is wrong with a record, where its maker has no sentence of its own."""
    if isinstance(error, OSError):
        file = f": {error.filename}" if error.filename else ""
        return (
            f"{name} can't be read ({error.strerror or error}{file}): check the disk, and that "
            "this user may read its files."
        )
    return f"{name} can't be decoded ({type(error).__name__}: {error}): repair or remove it."
