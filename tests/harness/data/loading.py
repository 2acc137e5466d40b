"""Loaders over records that a test makes up."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from paceline.data.decoding.decode_pool import DecodePool
from paceline.data.decoding.host_batches import HostBatches
from paceline.data.image.augment import Transform
from paceline.data.loader import Batch, DatabaseLoader
from paceline.data.order import Order
from paceline.data.sample_maker import SampleMaker
from paceline.data.source import Record
from paceline.data.upload import Upload
from paceline.recorder import NullRecorder, Recorder

CPU = torch.device("cpu")
PLAIN = Transform(augment="none", image_size=8)
RICH = Transform(augment="inception", image_size=8, scale=9, color_jitter=0.4, seed=5)


class ListSource:
    """Records from a list, each read of one told to a function first."""

    labels: npt.NDArray[np.int64] | None = None
    label_names: tuple[str, ...] | None = None
    index_note: str | None = None
    fingerprint = "list"

    def __init__(self, records: list[Record], on_read: Callable[[int], object] = abs):
        self._records = records
        self._on_read = on_read

    def name(self, index: int) -> str:
        return f"record {index}"

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Record:
        self._on_read(index)
        return self._records[index]

    def close(self) -> None: ...


def numbered(count: int) -> list[Record]:
    """Records whose pixels and labels are their numbers."""
    return [Record(np.full((8, 8, 3), index, np.uint8), index) for index in range(count)]


def photographs(count: int) -> list[Record]:
    """JPEG records of several sizes."""
    records = []
    for index in range(count):
        random = np.random.default_rng(index)
        small = random.integers(0, 256, (4, 5, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(small).resize((20 + index, 18)).save(file, "JPEG")
        records.append(Record(file.getvalue(), index % 3))
    return records


class Notes(NullRecorder):
    """Recorder of notes."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def event(self, name: str, **fields: object) -> None:
        assert name == "note"
        self.texts.append(str(fields["text"]))


class RankLoader:
    """A loader, asked by epoch and step for one rank's slices."""

    def __init__(
        self,
        loader: DatabaseLoader,
        rank_and_size: Callable[[], tuple[int, int]],
        shares: Callable[[int], Sequence[int] | None],
        prefetch: int,
        epochs: int | None,
        pool: DecodePool,
    ) -> None:
        self.loader, self.steps, self.pool = loader, loader.order.steps, pool
        self._rank_and_size, self._shares = rank_and_size, shares
        self._prefetch, self._epochs = prefetch, epochs

    def close(self) -> None:
        self.pool.close()

    def batch(self, epoch: int, step: int) -> Batch:
        rank_and_size = self._rank_and_size()
        steps = [
            divmod(epoch * self.steps + step + i, self.steps) for i in range(1 + self._prefetch)
        ]
        place, *ahead = [
            self.loader.order.place(at, one, *rank_and_size, self._shares(at * self.steps + one))
            for at, one in [(epoch, step), *steps[1:]]
            if self._epochs is None or at < self._epochs
        ]
        return self.loader.batch(place, ahead)


def host_batches(
    pool: DecodePool,
    source: Any,
    transform: Transform = PLAIN,
    *,
    mean: tuple[float, ...] = (0.0,),
    std: tuple[float, ...] = (1.0,),
    num_labels: int | None = None,
    channels_last: bool = True,
) -> HostBatches:
    """Batches of a pool, on the CPU."""
    channels = transform.channels
    fill = np.broadcast_to(np.clip(np.rint(mean), 0, 255).astype(np.uint8), (channels,))
    maker = SampleMaker(source=source, transform=transform, fill=fill, num_labels=num_labels)
    width, pixels = transform.image_size, {"mean": mean, "std": std}
    upload = Upload(
        **pixels, channels=channels, width=width, device=CPU, channels_last=channels_last
    )
    return HostBatches(pool, maker, upload)


@contextmanager
def loader_of(
    source: Any,
    batch_size: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    workers: int = 0,
    prefetch: int = 2,
    epochs: int | None = None,
    shares: Callable[[int], Sequence[int] | None] = lambda number: None,
    rank_and_size: Callable[[], tuple[int, int]] | None = None,
    recorder: Recorder | None = None,
    stopped_after: float = 10.0,
    **options: Any,
) -> Iterator[RankLoader]:
    order = options.pop("order", None) or Order(size=len(source), batch_size=batch_size, seed=2)
    transform = options.pop("transform", PLAIN)
    pool = DecodePool(workers, recorder=recorder, stopped_after=stopped_after)
    maker = host_batches(
        pool,
        source,
        transform,
        mean=options.pop("mean", (0.0,)),
        std=options.pop("std", (1.0,)),
        num_labels=options.pop("num_labels", None),
        channels_last=options.pop("channels_last", True),
    )
    loader = DatabaseLoader(order, maker, recorder=recorder, **options)
    ranked = rank_and_size or (lambda: (rank, world_size))
    try:
        yield RankLoader(loader, ranked, shares, prefetch, epochs, pool)
    finally:
        pool.close()


def epoch_of(loader: RankLoader, epoch: int = 0) -> list[Batch]:
    return [loader.batch(epoch, step) for step in range(loader.steps)]


def joined(batches: list[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
    """The real samples of ranks' batches of one step, in rank order."""
    images = torch.cat([batch.images[: batch.place.count] for batch in batches])
    return images, torch.cat([batch.labels[: batch.place.count] for batch in batches])
