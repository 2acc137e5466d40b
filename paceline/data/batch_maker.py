"""The seam below the loader: from records' numbers to a batch on the device.

    begin ──▶ Making ──▶ wait ──▶ on_device ──▶ release

`HostBatches` (`decoding/host_batches.py`) decodes in processes, `DeviceBatches`
(`gpu_decode/device_batches.py`) on the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any, Protocol

import torch

from paceline.data.decoding.decode_pool import DecodeDevice
from paceline.data.order import Indices
from paceline.data.upload import Uploaded
from paceline.errors import DataError


class Making(Protocol):
    """Samples under construction; equal to themselves alone.

    Attributes:
        records: the records' numbers, shape (n,).
        bad: what is wrong with records that give no sample, by number; complete after `wait`.
    """

    @property
    def records(self) -> Indices: ...
    @property
    def bad(self) -> Mapping[int, DataError]: ...


Part = tuple[Any, slice | Indices]
"""Some samples of a `Making` of the same maker, by their places in it."""


class BatchMaker(Protocol):
    """Protocol of a maker of batches."""

    def begin(self, epoch: int, records: Indices) -> Making:
        """Begin to make samples of (n,) records."""

    def wait(self, makings: Sequence[Any], timeout: float) -> bool:
        """Wait until samples are made; return whether they are, within `timeout` seconds.

        Raises:
            DataError: nothing can be made here.
        """

    def on_device(self, parts: Sequence[Part]) -> Uploaded:
        """Return a batch of parts in their order, at least one, on the device."""

    def release(self, making: Any, copied: torch.cuda.Event | None) -> None:
        """Give samples up, made or not; their memory is free once `copied` is over."""

    def taken(self, samples: int, waited: float) -> None:
        """Measure: a batch of `samples` was taken after a wait of `waited` seconds."""


class SwitchedBatches:
    """Maker of batches on the CPU or on the GPU, as `present` says when they are begun."""

    def __init__(self, present: DecodeDevice, cpu: BatchMaker, cuda: BatchMaker) -> None:
        self._present = present
        self._makers = {"cpu": cpu, "cuda": cuda}
        self._maker_of: dict[Making, BatchMaker] = {}

    def begin(self, epoch: int, records: Indices) -> Making:
        """Begin to make samples."""
        maker = self._makers[self._present.name]
        making = maker.begin(epoch, records)
        # The device may change between a batch's begin and its use.
        self._maker_of[making] = maker
        return making

    def wait(self, makings: Sequence[Making], timeout: float) -> bool:
        """Wait until samples are made; `timeout` is that of all makers together."""
        deadline = monotonic() + timeout
        return all(
            self._maker_of[each].wait([each], max(0.0, deadline - monotonic())) for each in makings
        )

    def on_device(self, parts: Sequence[Part]) -> Uploaded:
        """Return a batch of parts in their order; those of one batch may have two makers."""
        made = [self._maker_of[making].on_device([(making, at)]) for making, at in parts]
        if len(made) == 1:
            return made[0]
        copied = next((each.copied for each in reversed(made) if each.copied is not None), None)
        images = torch.cat([each.images for each in made])
        return Uploaded(images, torch.cat([each.labels for each in made]), copied)

    def release(self, making: Making, copied: torch.cuda.Event | None) -> None:
        """Give samples up."""
        self._maker_of.pop(making).release(making, copied)

    def taken(self, samples: int, waited: float) -> None:
        """Measure the maker that is used at present."""
        self._makers[self._present.name].taken(samples, waited)
