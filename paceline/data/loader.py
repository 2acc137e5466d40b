"""Batches by their slice of the order: read, decoded, normalised, on the device, ahead of time.

    batch slice ──▶ its records ──▶ chunks ──▶ decode processes
                                                      │
    Batch on the device  ◀──  Upload  ◀──  uint8 (n, height, width, channels)

Nothing here iterates: a step asks for the batch of a slice, and names the slices that are begun
ahead of it, those of the next few steps, into the next epoch too. A jump (a rollback to a snapshot)
drops what was begun. Where the ranks' shares change, the samples that the old slice of a step and
its new one share are used, and only the rest is decoded. A batch depends on its slice alone;
neither the number of decode processes nor what is begun ahead changes a bit of it.

A bad record ends the run, or is skipped: the batch is smaller by it, and the other samples count as
before. So the trained samples don't depend on the rank that read it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from paceline.data.batch_slice import BatchSlice
from paceline.data.decoding.decode_pool import DecodePool, Work
from paceline.data.image.augment import Transform
from paceline.data.order import Indices, Order
from paceline.data.sample_maker import SampleMaker
from paceline.data.skipped_records import SkippedRecords
from paceline.data.source import Source
from paceline.data.upload import Upload
from paceline.errors import DataError

_REMEDY = "Use --bad_records skip to leave out such records, or `paceline db info` to find them."


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Batch of one rank on its device: the images and labels of its batch slice.

    Attributes:
        images: float32, normalised, shape (n, channels, image_size, image_size), on the device.
        labels: int64, shape (n,), on the device.
        place: the batch slice. If its `count` is 0, `images` holds a single placeholder of weight
            0: another slice's sample, or a blank image.
        waited: seconds for which the caller waited for its samples.
    """

    images: Tensor
    labels: Tensor
    place: BatchSlice
    waited: float


@dataclass(frozen=True)
class _Part:
    """Consecutive samples of a batch under construction.

    Attributes:
        work: the samples that are made.
        first: the position of the first of them in the epoch's order.
        begin: the part's first sample in `work`.
        end: the sample after its last one.
    """

    work: Work
    first: int
    begin: int
    end: int

    @property
    def positions(self) -> range:
        return range(self.first, self.first + self.end - self.begin)

    @property
    def records(self) -> Indices:
        return self.work.room.records[self.begin : self.end]

    @property
    def images(self) -> Tensor:
        return torch.from_numpy(self.work.room.images[self.begin : self.end])

    @property
    def labels(self) -> Tensor:
        return torch.from_numpy(self.work.room.labels[self.begin : self.end])

    def within(self, positions: range) -> _Part | None:
        """Return the part of it at some positions of the order; None if there is none."""
        first = max(self.first, positions.start)
        last = min(self.positions.stop, positions.stop)
        if first >= last:
            return None
        shift = self.begin - self.first
        return _Part(self.work, first, first + shift, last + shift)


class DatabaseLoader:
    """Batch loader of one rank: reads, decodes and augments images ahead of the step.

    Args:
        source: the source of records, which the caller must close.
        order: the order in which each epoch reads the records.
        transform: the transform of each image.
        pool: the decode processes, which the caller must close; several loaders may share them.
        mean: mean of each channel, in 0..255; a single value is used for all channels.
        std: standard deviation of each channel, in 0..255; a single value is used for all channels.
        device: device to which batches are copied.
        num_labels: number of classes: labels must be 0 to num_labels - 1; None: labels are not
            checked.
        skip_bad: whether to skip bad records instead of raising the error of the first one.
        warn: called in the caller's thread with sentences about skipped records.
        channels_last: whether images are in channels-last memory format.
        timeout: the longest time that `batch` waits, in seconds.

    Attributes:
        order: the order.
        pool: the decode processes.
    """

    def __init__(
        self,
        source: Source,
        order: Order,
        transform: Transform,
        pool: DecodePool,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device,
        num_labels: int | None = None,
        skip_bad: bool = False,
        warn: Callable[[str], object] = lambda text: None,
        channels_last: bool = True,
        timeout: float = 600.0,
    ) -> None:
        self.order = order
        self.pool = pool
        self._timeout = timeout
        self._skipped = SkippedRecords(warn) if skip_bad else None
        fill = np.clip(np.rint(mean), 0, 255).astype(np.uint8)
        self._fill = np.broadcast_to(fill, (transform.channels,))
        self._maker = pool.add(
            SampleMaker(source=source, transform=transform, fill=self._fill, num_labels=num_labels)
        )
        self._upload = Upload(
            mean=mean,
            std=std,
            channels=transform.channels,
            width=transform.image_size,
            device=device,
            channels_last=channels_last,
        )
        self._begun: dict[BatchSlice, list[_Part]] = {}
        self._uses: dict[int, int] = {}  # parts that are begun, by the work's serial number
        self._indices: dict[int, Indices] = {}  # by epoch

    def batch(self, place: BatchSlice, ahead: Sequence[BatchSlice] = ()) -> Batch:
        """Take the batch of a slice, and begin those of the slices that come next.

        Args:
            place: this rank's slice of the step's global batch.
            ahead: its present slices of the next steps; what else was begun is dropped.

        Raises:
            DataError: a record is damaged or its label isn't below `num_labels`, and bad records
                aren't to be skipped, or most are bad; the source took too long; or decode processes
                die again and again.
        """
        self._begin([place, *ahead])
        begun = time.perf_counter()
        parts = self._begun[place]
        bad = self._finish(parts, place)
        waited = time.perf_counter() - begun
        del self._begun[place]
        try:
            if place.count:
                if self._skipped is not None:
                    self._skipped.take(place.rank, place, bad)
                elif bad:
                    first = next(iter(bad.values()))
                    raise DataError(f"{first} {_REMEDY}") from first
                place = replace(place, skipped=len(bad))
            samples = self._good(parts, bad) if bad else [(p.images, p.labels) for p in parts]
            uploaded = self._upload(samples)
        except BaseException:
            self._release(parts)
            raise
        self._release(parts, uploaded.copied)
        self.pool.batch_made(len(uploaded.labels), waited)
        return Batch(images=uploaded.images, labels=uploaded.labels, place=place, waited=waited)

    def close(self) -> None:
        """Drop what was begun."""
        for parts in self._begun.values():
            self._release(parts)
        self._begun.clear()

    def _begin(self, wanted: list[BatchSlice]) -> None:
        """Begin what is wanted and not begun yet, and drop what is no longer wanted."""
        recut = {}
        for place in self._begun.keys() - set(wanted):
            recut[place.number] = self._begun.pop(place)
        for epoch in self._indices.keys() - {place.epoch for place in wanted}:
            del self._indices[epoch]
        for place in wanted:
            if place not in self._begun:
                self._begun[place] = self._parts(place, recut.get(place.number, []))
        for parts in recut.values():
            self._release(parts)

    def _parts(self, place: BatchSlice, earlier: Sequence[_Part]) -> list[_Part]:
        """Begin a batch; `earlier` are the same step's parts, begun for another slice of it."""
        positions = range(place.computed.start, place.computed.stop)
        kept = [part for each in earlier if (part := each.within(positions)) is not None]
        parts = []
        at = positions.start
        for part in kept:
            if at < part.first:
                parts.append(self._new_part(place.epoch, range(at, part.first)))
            parts.append(part)
            at = part.positions.stop
        if at < positions.stop:
            parts.append(self._new_part(place.epoch, range(at, positions.stop)))
        for part in parts:
            serial = part.work.serial
            self._uses[serial] = self._uses.get(serial, 0) + 1
        return parts

    def _new_part(self, epoch: int, positions: range) -> _Part:
        if epoch not in self._indices:
            self._indices[epoch] = self.order.epoch_indices(epoch)
        records = self._indices[epoch][positions.start : positions.stop]
        work = self.pool.begin(self._maker, epoch, records)
        return _Part(work, positions.start, 0, len(records))

    def _release(self, parts: Sequence[_Part], copied: object = None) -> None:
        """Give rooms back that no other batch uses."""
        for part in parts:
            serial = part.work.serial
            self._uses[serial] -= 1
            if not self._uses[serial]:
                del self._uses[serial]
                self.pool.release(part.work, copied)

    def _good(
        self, parts: Sequence[_Part], bad: Mapping[int, DataError]
    ) -> list[tuple[Tensor, Tensor]]:
        """Leave bad records out of a batch; where none is left, one blank record replaces them."""
        samples = []
        for part in parts:
            good = torch.from_numpy(~np.isin(part.records, list(bad)))
            if good.any():
                samples.append((part.images[good], part.labels[good]))
        if samples:
            return samples
        blank = torch.from_numpy(self._fill.copy()).expand_as(parts[0].images[:1])
        return [(blank, torch.zeros(1, dtype=torch.int64))]

    def _finish(self, parts: Sequence[_Part], place: BatchSlice) -> dict[int, DataError]:
        """Wait until a batch is made, and return what is wrong with its bad records, in order."""
        if not self.pool.wait([part.work for part in parts], self._timeout):
            raise DataError(
                f"the batch of epoch {place.epoch}, step {place.step} wasn't read within "
                f"{self._timeout:g} s: the database's disk or network doesn't respond; repair it, "
                "and start the same command again to resume."
            )
        bad: dict[int, DataError] = {}
        for part in parts:
            if part.work.bad:
                found = part.work.bad
                bad |= {r: found[r] for r in part.records.tolist() if r in found}
        return bad
