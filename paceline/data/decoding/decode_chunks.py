"""The loop of a decode process: take a chunk, make its samples in their buffer, finish it.

The automatic number of decode processes, and --decode_workers 0, run the same loop in a thread of
the training process.
"""

from __future__ import annotations

import errno
import json
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from paceline.data.decoding.chunk_queue import Chunk, ChunkQueue
from paceline.data.decoding.ring import MappedBuffers, Ring
from paceline.data.order import Indices
from paceline.data.source import Pixels, SourceLost
from paceline.errors import DataError

NO_RECORD = -1
_LONGEST = 5_000  # characters of a report, of up to 12 bytes in JSON: the receiver reads 64 KiB
_USED_UP = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # descriptors or memory
_FREE = "free memory, or start fewer processes (--decode_workers; of paceline db: --workers)"


class Maker(Protocol):
    """Protocol of what makes samples from records; it is pickled for the decode processes.

    Attributes:
        sample_bytes: bytes of a sample, at most.
        pinned: whether samples are copied to the device as they are.
    """

    @property
    def sample_bytes(self) -> int: ...
    @property
    def pinned(self) -> bool: ...

    def numbers(self, epoch: int, records: Indices) -> list[list[float]]:
        """Draw the random numbers of the samples of (n,) records."""

    def write(self, index: int, numbers: list[float], out: Pixels) -> int:
        """Write the sample of a record to `out`, uint8 of shape (sample_bytes,); return its label.

        Raises:
            DataError: the record gives no sample.
        """

    def name(self, index: int) -> str:
        """Name a record, for errors."""

    def close(self) -> None:
        """Close the records' database, in a decode process that ends."""


class Report(NamedTuple):
    """Report that a record gives no sample, or that decoding can't go on; a packet has it as JSON.

    Attributes:
        serial: number of the batch.
        record: the record's number, or NO_RECORD: whatever the record, it would be the same.
        text: what is wrong.
    """

    serial: int
    record: int
    text: str

    def packet(self) -> bytes:
        """Return the packet; a long text is cut."""
        return json.dumps(self._replace(text=self.text[:_LONGEST])).encode()


def decode_chunks(
    worker: int,
    queue: ChunkQueue,
    buffers: Ring | MappedBuffers,
    reports: socket.socket,
    makers: Sequence[Maker],
) -> None:
    """Make samples until the queue says that this worker ends, or decoding can't go on.

    Args:
        buffers: the buffers of the batches.
        reports: receives a packet for each record that gives no sample, and one where decoding
            can't go on.
        makers: the sample makers, by number.
    """
    try:
        while chunk := queue.take(worker):
            begun = _runnable_ns()
            for report in _make(worker, queue, buffers, chunk, makers[chunk.maker]):
                reports.send(report.packet())
            queue.finish(worker, chunk, _runnable_ns() - begun)
    except DataError as error:
        reports.send(Report(NO_RECORD, NO_RECORD, str(error)).packet())
    except Exception as error:
        remedy = "start the same command again to resume; if it ends so again, report the error"
        if _is_used_up(error):
            remedy = _FREE
        text = f"Decoding can't go on ({_reason(error)}): {remedy}."
        reports.send(Report(NO_RECORD, NO_RECORD, text).packet())


def _runnable_ns() -> int:
    """Return the time in which the calling thread computed or waited for a core, from some origin.

    The rest of the time it was blocked, which for a decoder means: by the disk. A thread's
    processor time alone would take a busy machine for a slow disk.
    """
    try:
        text = Path("/proc/thread-self/schedstat").read_text()
    except OSError:  # a kernel without scheduler statistics
        return time.thread_time_ns()
    computed, waited, _ = text.split()
    # With the time in which it waited for a core: the rest is waiting for the disk.
    return int(computed) + int(waited)


def _make(
    worker: int, queue: ChunkQueue, buffers: Ring | MappedBuffers, chunk: Chunk, maker: Maker
) -> list[Report]:
    """Make a chunk's samples; return the reports of bad records.

    Raises:
        DataError: what failed isn't the record: the database is gone, or memory or descriptors are.
    """
    buffer = buffers.buffer(chunk.offset, chunk.count, maker.sample_bytes)
    records = buffer.records[chunk.begin : chunk.end]
    numbers = maker.numbers(chunk.epoch, records)
    bad = []
    for at, record in enumerate(records.tolist()):
        sample = chunk.begin + at
        queue.reach(worker, sample)
        try:
            buffer.labels[sample] = maker.write(record, numbers[at], buffer.samples[sample])
        # No record can be read any more: to skip them all would be to train on nothing.
        except SourceLost:
            raise
        except DataError as error:
            bad.append(Report(chunk.serial, record, str(error)))
        except Exception as error:
            # Skipped like a bad record, it would be another record in the next run.
            if _is_used_up(error):
                raise DataError(
                    f"{maker.name(record)} can't be decoded ({_reason(error)}): {_FREE}, or remove "
                    "the record if it is far larger than others."
                ) from error
            bad.append(Report(chunk.serial, record, _sentence(maker.name(record), error)))
    return bad


def _is_used_up(error: Exception) -> bool:
    """Return whether memory or descriptors are used up, which isn't the record's fault."""
    return isinstance(error, MemoryError) or getattr(error, "errno", None) in _USED_UP


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _sentence(name: str, error: Exception) -> str:
    """Say what is wrong with a record, where its maker has no sentence of its own."""
    if isinstance(error, OSError):
        file = f": {error.filename}" if error.filename else ""
        return (
            f"{name} can't be read ({error.strerror or error}{file}): check the disk, and that "
            "this user may read its files."
        )
    return f"{name} can't be decoded ({_reason(error)}): repair or remove it."
