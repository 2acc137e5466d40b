"""Loaders over records that a test makes up."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from paceline.data.image.augment import Transform
from paceline.data.loader import Batch, DatabaseLoader
from paceline.data.order import Order
from paceline.data.source import Record

CPU = torch.device("cpu")
PLAIN = Transform(augment="none", image_size=8)
RICH = Transform(augment="inception", image_size=8, scale=9, color_jitter=0.4, seed=5)


class ListSource:
    """Records from a list, each read of one told to a function first."""

    labels: npt.NDArray[np.int64] | None = None
    label_names: tuple[str, ...] | None = None
    index_note: str | None = None
    fingerprint = "list"

    def __init__(self, records: list[Record], on_read: Callable[[int], object] = lambda i: None):
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


@contextmanager
def loader_of(source: Any, batch_size: int, **options: Any) -> Iterator[DatabaseLoader]:
    order = options.pop("order", None) or Order(size=len(source), batch_size=batch_size, seed=2)
    rank_and_size = options.pop("rank", 0), options.pop("world_size", 1)
    defaults: dict[str, Any] = {"mean": (0.0,), "std": (1.0,), "threads": 2}
    defaults["rank_and_size"] = lambda: rank_and_size
    transform = options.pop("transform", PLAIN)
    loader = DatabaseLoader(source, order, transform, device=CPU, **(defaults | options))
    try:
        yield loader
    finally:
        loader.close()


def epoch_of(loader: DatabaseLoader, epoch: int = 0) -> list[Batch]:
    return [loader.batch(epoch, step) for step in range(loader.steps)]


def joined(batches: list[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
    """The real samples of ranks' batches of one step, in rank order."""
    images = torch.cat([batch.images[: batch.place.count] for batch in batches])
    return images, torch.cat([batch.labels[: batch.place.count] for batch in batches])
