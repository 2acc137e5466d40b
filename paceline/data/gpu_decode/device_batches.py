"""Batches that the GPU decodes, begun ahead in two threads: one reads while nvJPEG decodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import count
from typing import ClassVar

import torch

from paceline.data.batch_maker import Part
from paceline.data.gpu_decode.decoder import GpuBatch, GpuBatchDecoder
from paceline.data.order import Indices
from paceline.data.upload import Uploaded
from paceline.errors import DataError

_THREADS = 2
_CLOSE_S = 2.0  # Ctrl-C must end a run within five


@dataclass(frozen=True, eq=False)
class DeviceMaking:
    """Samples that a thread makes; see `Making`."""

    serial: int
    records: Indices
    batch: Future[GpuBatch]

    @property
    def bad(self) -> Mapping[int, DataError]:
        """What is wrong with records that give no sample, by number."""
        return self.batch.result().bad


class DecodeThreads:
    """Threads in which a run's batches are decoded, of training and evaluation."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="paceline-gpu-decode")
        self._running: set[Future[GpuBatch]] = set()

    def begin(self, decoder: GpuBatchDecoder, epoch: int, records: Indices) -> Future[GpuBatch]:
        """Begin a batch once a thread is free."""
        batch = self._executor.submit(decoder.make, epoch, records)
        self._running.add(batch)
        batch.add_done_callback(self._running.discard)
        return batch

    def close(self) -> None:
        """End the threads; a read that hangs is abandoned after two seconds."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        wait(list(self._running), timeout=_CLOSE_S)


class DeviceBatches:
    """Maker of batches by a `GpuBatchDecoder`.

    Args:
        decoder: the decoder.
        threads: the threads in which it is used.
    """

    # Below those of the decode pool, with which they may share a loader.
    _serials: ClassVar[count[int]] = count(-1, -1)

    def __init__(self, decoder: GpuBatchDecoder, threads: DecodeThreads) -> None:
        self._decoder = decoder
        self._threads = threads

    def begin(self, epoch: int, records: Indices) -> DeviceMaking:
        """Begin to make samples."""
        batch = self._threads.begin(self._decoder, epoch, records)
        return DeviceMaking(next(self._serials), records, batch)

    def wait(self, makings: Sequence[DeviceMaking], timeout: float) -> bool:
        """Wait until threads have begun all of a batch's work on the device."""
        _, waiting = wait([making.batch for making in makings], timeout)
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
        """Give a batch up."""
        making.batch.cancel()

    def taken(self, samples: int, waited: float) -> None:
        """Measure nothing: the number of threads is fixed."""
