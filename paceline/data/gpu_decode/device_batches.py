"""Batches that the GPU decodes, begun ahead.

records ──▶ decode processes: files and plans ──▶ one thread: nvJPEG and kernels ──▶ batch
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from time import monotonic

import torch

from paceline.data.batch_maker import Part
from paceline.data.decoding.decode_pool import DecodePool, Work
from paceline.data.gpu_decode.decoder import GpuBatch, GpuBatchDecoder
from paceline.data.gpu_decode.file_maker import FileMaker
from paceline.data.order import Indices
from paceline.data.upload import Uploaded
from paceline.errors import DataError

_LOOK_S = 0.001  # between two looks for files that are ready
_CLOSE_S = 2.0  # Ctrl-C must end a run within five


@dataclass(eq=False)
class DeviceMaking:
    """Samples that are made; see `Making`.

    Attributes:
        work: their files.
        dropped: set once no step takes them any more.
    """

    work: Work
    dropped: threading.Event = field(default_factory=threading.Event)
    batch: Future[GpuBatch] = field(default_factory=Future)

    @property
    def records(self) -> Indices:
        """The records' numbers, shape (n,)."""
        return self.work.records

    @property
    def bad(self) -> Mapping[int, DataError]:
        """What is wrong with records that give no sample, by number."""
        return {**self.work.bad, **self.batch.result().bad}


class DecodeThread:
    """Thread in which a run's batches are decoded, of training and evaluation."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="paceline-gpu-decode")
        self._running: set[DeviceMaking] = set()

    def begin(
        self, pool: DecodePool, decoder: GpuBatchDecoder, epoch: int, making: DeviceMaking
    ) -> None:
        """Begin a batch after those begun before."""
        self._running.add(making)
        making.batch = self._executor.submit(_decode, pool, decoder, epoch, making)
        making.batch.add_done_callback(lambda batch: self._running.discard(making))

    def close(self) -> None:
        """End the thread; a read that hangs is abandoned after two seconds."""
        running = list(self._running)
        for making in running:
            making.dropped.set()
        self._executor.shutdown(wait=False, cancel_futures=True)
        wait([making.batch for making in running], timeout=_CLOSE_S)


class DeviceBatches:
    """Maker of batches by a `GpuBatchDecoder`.

    Args:
        pool: the decode processes.
        maker: prepares what the decoder needs.
        thread: the thread in which it is used.
    """

    def __init__(
        self, pool: DecodePool, maker: FileMaker, decoder: GpuBatchDecoder, thread: DecodeThread
    ) -> None:
        self._pool = pool
        self._maker = pool.add(maker)
        self._decoder = decoder
        self._thread = thread
        self._dropped: list[DeviceMaking] = []  # whose files the thread may still read

    def begin(self, epoch: int, records: Indices) -> DeviceMaking:
        """Begin to make samples."""
        for making in list(self._dropped):
            if making.batch.done():
                self._dropped.remove(making)
                self._pool.release(making.work)
        making = DeviceMaking(self._pool.begin(self._maker, epoch, records))
        self._thread.begin(self._pool, self._decoder, epoch, making)
        return making

    def wait(self, makings: Sequence[DeviceMaking], timeout: float) -> bool:
        """Wait until the thread has begun all of a batch's work on the device."""
        end = monotonic() + timeout
        if not self._pool.wait([making.work for making in makings], timeout):
            return False
        _, waiting = wait([making.batch for making in makings], end - monotonic())
        return not waiting

    def on_device(self, parts: Sequence[Part]) -> Uploaded:
        """Let the current stream wait for a batch, which is on the device already."""
        images = []
        labels = []
        for making, at in parts:
            batch = making.batch.result()
            batch.receive()
            where = at if isinstance(at, slice) else torch.from_numpy(at).to(batch.labels.device)
            images.append(batch.images[where])
            labels.append(batch.labels[where])
        if len(parts) == 1:
            return Uploaded(images[0], labels[0], None)
        return Uploaded(torch.cat(images), torch.cat(labels), None)

    def release(self, making: DeviceMaking, copied: torch.cuda.Event | None) -> None:
        """Give a batch up; its files are kept until nvJPEG has read them."""
        making.dropped.set()
        if not making.batch.cancel() and not making.batch.done():
            self._dropped.append(making)
            return
        made = not making.batch.cancelled() and making.batch.exception() is None
        self._pool.release(making.work, making.batch.result().ready if made else None)

    def taken(self, samples: int, waited: float) -> None:
        """Measure nothing: one process reads as fast as a GPU decodes."""


def _decode(
    pool: DecodePool, decoder: GpuBatchDecoder, epoch: int, making: DeviceMaking
) -> GpuBatch:
    """Decode a batch once its files are there, in the thread.

    Raises:
        DataError: no step takes it any more.
    """
    while not pool.is_made(making.work):
        if making.dropped.wait(_LOOK_S):
            raise DataError("this batch was dropped")
    return decoder.make(epoch, making.work.buffer)
