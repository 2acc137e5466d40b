"""Batches whose images decode processes make."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.data.batch_maker import Part
from paceline.data.decoding.decode_pool import DecodePool, Work
from paceline.data.order import Indices
from paceline.data.sample_maker import SampleMaker
from paceline.data.upload import Upload, Uploaded


class HostBatches:
    """Maker of batches in the buffers of a decode pool, copied to the device and normalised there.

    Args:
        pool: the decode processes.
        upload: the uploader.
    """

    def __init__(self, pool: DecodePool, maker: SampleMaker, upload: Upload) -> None:
        self._pool = pool
        self._maker = pool.add(maker)
        self._upload = upload
        size = maker.transform.image_size
        self._shape = (size, size, maker.transform.channels)

    def begin(self, epoch: int, records: Indices) -> Work:
        """Begin to make samples."""
        return self._pool.begin(self._maker, epoch, records)

    def wait(self, makings: Sequence[Work], timeout: float) -> bool:
        """Wait until samples are made."""
        return self._pool.wait(makings, timeout)

    def on_device(self, parts: Sequence[Part]) -> Uploaded:
        """Copy a batch to the device."""
        samples = []
        for work, at in parts:
            pixels = work.buffer.samples[at].reshape(-1, *self._shape)
            samples.append((torch.from_numpy(pixels), torch.from_numpy(work.buffer.labels[at])))
        return self._upload(samples)

    def release(self, making: Work, copied: torch.cuda.Event | None) -> None:
        """Give a buffer back."""
        self._pool.release(making, copied)

    def taken(self, samples: int, waited: float) -> None:
        """Measure how many decode processes are needed."""
        self._pool.batch_made(samples, waited)
