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
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from paceline.data.batch_maker import BatchMaker, Making
from paceline.data.batch_slice import BatchSlice
from paceline.data.order import Indices, Order
from paceline.data.skipped_records import SkippedRecords
from paceline.data.upload import Uploaded
from paceline.errors import DataError
from paceline.recorder import NullRecorder, Recorder

_REMEDY = "Use --bad_records skip to leave out such records, or `paceline db info` to find them."


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Batch of one rank on its device: the images and labels of its batch slice.

    Attributes:
        images: float32, normalised, shape (n, channels, image_size, image_size), on the device.
        labels: int64, shape (n,), on the device.
        place: the batch slice. If its `count` is 0, `images` holds a placeholder of weight 0:
            other slices' samples, or a blank image.
    """

    images: Tensor
    labels: Tensor
    place: BatchSlice


@dataclass(frozen=True)
class _Part:
    """Consecutive samples of a batch under construction.

    Attributes:
        making: the samples that are made.
        first: the position of the first of them in the epoch's order.
        begin: the part's first sample in `making`.
        end: the sample after its last one.
    """

    making: Making
    first: int
    begin: int
    end: int

    @property
    def positions(self) -> range:
        return range(self.first, self.first + self.end - self.begin)

    @property
    def records(self) -> Indices:
        return self.making.records[self.begin : self.end]

    def within(self, positions: range) -> _Part | None:
        """Return the part of it at some positions of the order; None if there is none."""
        first = max(self.first, positions.start)
        last = min(self.positions.stop, positions.stop)
        if first >= last:
            return None
        shift = self.begin - self.first
        return _Part(self.making, first, first + shift, last + shift)

    def without(self, bad: Mapping[int, DataError]) -> slice | Indices:
        """Return the places in `making` of its samples but those of bad records."""
        if not bad:
            return slice(self.begin, self.end)
        return np.flatnonzero(~np.isin(self.records, list(bad))) + self.begin


class DatabaseLoader:
    """Batch loader of one rank: reads, decodes and augments images ahead of the step.

    Args:
        order: the order in which each epoch reads the records.
        maker: makes the batches.
        skip_bad: whether to skip bad records instead of raising the error of the first one.
        recorder: receives notes on skipped records, in the caller's thread.
        timeout: the longest time that `batch` waits, in seconds.
    """

    def __init__(
        self,
        order: Order,
        maker: BatchMaker,
        *,
        skip_bad: bool = False,
        recorder: Recorder | None = None,
        timeout: float = 600.0,
    ) -> None:
        self.order = order
        self._maker = maker
        self._timeout = timeout
        self._skipped = SkippedRecords(recorder or NullRecorder()) if skip_bad else None
        self._begun: dict[BatchSlice, list[_Part]] = {}
        self._uses: Counter[Making] = Counter()  # parts that are begun
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
            uploaded = self._on_device(parts, bad)
        except BaseException:
            self._release(parts)
            raise
        self._release(parts, uploaded.copied)
        self._maker.taken(len(uploaded.labels), waited)
        return Batch(images=uploaded.images, labels=uploaded.labels, place=place)

    def close(self) -> None:
        """Drop what was begun."""
        for parts in self._begun.values():
            self._release(parts)
        self._begun.clear()

    def _begin(self, wanted: list[BatchSlice]) -> None:
        """Begin what is wanted and not begun yet, and drop what is no longer wanted."""
        recut = {}
        # A jump, or new shares: what is still wanted of the same step's samples is used.
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
            self._uses[part.making] += 1
        return parts

    def _new_part(self, epoch: int, positions: range) -> _Part:
        if epoch not in self._indices:
            self._indices[epoch] = self.order.epoch_indices(epoch)
        records = self._indices[epoch][positions.start : positions.stop]
        making = self._maker.begin(epoch, records)
        return _Part(making, positions.start, 0, len(records))

    def _release(self, parts: Sequence[_Part], copied: torch.cuda.Event | None = None) -> None:
        """Give buffers back that no other batch uses."""
        for part in parts:
            self._uses[part.making] -= 1
            if not self._uses[part.making]:
                del self._uses[part.making]
                self._maker.release(part.making, copied)

    def _on_device(self, parts: Sequence[_Part], bad: Mapping[int, DataError]) -> Uploaded:
        """Bring good samples to the device; where none is good, a blank one of label 0."""
        good = [(part.making, part.without(bad)) for part in parts]
        chosen = [(making, at) for making, at in good if isinstance(at, slice) or at.size]
        if chosen:
            return self._maker.on_device(chosen)
        uploaded = self._maker.on_device([(parts[0].making, slice(0, 1))])
        images = torch.zeros_like(uploaded.images)
        return Uploaded(images, torch.zeros_like(uploaded.labels), uploaded.copied)

    def _finish(self, parts: Sequence[_Part], place: BatchSlice) -> dict[int, DataError]:
        """Wait until a batch is made, and return what is wrong with its bad records, in order."""
        if not self._maker.wait([part.making for part in parts], self._timeout):
            raise DataError(
                f"the batch of epoch {place.epoch}, step {place.step} wasn't read within "
                f"{self._timeout:g} s: the database's disk or network doesn't respond; repair it, "
                "and start the same command again to resume."
            )
        bad: dict[int, DataError] = {}
        for part in parts:
            found = part.making.bad
            if found:
                bad |= {r: found[r] for r in part.records.tolist() if r in found}
        return bad
