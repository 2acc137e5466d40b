"""A data set whose random transforms depend on (seed, epoch, sample), not on who loads it.

Transforms draw from the streams of Python, numpy and torch, which belong to the process: what they
give depends on all earlier draws of the process. So each sample is made with streams of its own,
and the caller's are put back behind it:

    batch of 7 and 2     caller's streams aside │ seeded by (seed, epoch, 7): dataset[7] │
                         seeded by (seed, epoch, 2): dataset[2] │ caller's streams back
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

from paceline.data import splitmix
from paceline.errors import ConfigError

_TRANSFORM = 4  # a purpose beside those of the order and of made-up images


AskedSample = tuple[int, int, int]
"""Epoch, number of the sample, and what its random transforms depend on besides the epoch."""


class MapStyle(Protocol):
    """Protocol of a map-style data set: `__getitem__` and `__len__`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class SeededDataset(Dataset[Any]):
    """Data set wrapper whose random transforms depend only on seed, epoch and sample number.

    Args:
        dataset: the map-style data set that makes the samples.
        seed: seed of the random transforms; different seeds give different transforms.
    """

    def __init__(self, dataset: MapStyle, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def require_length(self, size: int) -> None:
        """Require the length of the order by which the data set is read.

        Raises:
            ConfigError: it is another one by now.
        """
        length = len(self._dataset)
        if length != size:
            raise ConfigError(
                f"{type(self._dataset).__name__} has {length:,} samples, but had {size:,} when its "
                "loader was made, which orders and divides these: keep its length while the run "
                "lasts, or pass an IterableDataset, whose epochs may differ in length. For an "
                "evaluation, make a new loader."
            )

    def __getitems__(self, places: Sequence[AskedSample]) -> list[Any]:
        """Make the samples of a batch, each with its own CPU random streams.

        A `DataLoader` calls this method once per batch, where a data set has it. The random streams
        of devices are not changed.
        """
        with kept_streams():
            return [self._make(*place) for place in places]

    def _make(self, epoch: int, index: int, key: int) -> Any:
        seed_streams(splitmix.base(self._seed, _TRANSFORM, epoch, key))
        return self._dataset[index]


@contextmanager
def kept_streams() -> Iterator[None]:
    """Restore the process's CPU random streams behind a block."""
    pythons = random.getstate()
    numpys = np.random.get_state()
    torchs = torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)
        torch.set_rng_state(torchs)


def seed_streams(seed: int) -> None:
    """Seed the process's CPU random streams."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
