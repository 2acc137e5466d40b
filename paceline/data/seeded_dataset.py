"""A data set whose random transforms depend on (seed, epoch, sample), not on who loads it.

Transforms draw from the streams of Python, numpy and torch, which belong to the process: what they
give depends on all earlier draws of the process. So each sample is made with streams of its own,
and the caller's are put back behind it:

    dataset[epoch, 7]     caller's streams aside │ seeded by (seed, epoch, 7): dataset[7] │ back
"""

from __future__ import annotations

import random
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

from paceline.data import splitmix

_TRANSFORM = 4  # a purpose beside those of the order and of made-up images


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

    def __getitem__(self, place: tuple[int, int]) -> Any:
        """Make a sample with its own streams of the CPU; a device's aren't touched."""
        epoch, index = place
        seed = splitmix.base(self._seed, _TRANSFORM, epoch, index)
        ours, numpys, torchs = random.getstate(), np.random.get_state(), torch.get_rng_state()
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        try:
            return self._dataset[index]
        finally:
            random.setstate(ours)
            np.random.set_state(numpys)
            torch.set_rng_state(torchs)
