"""The data order: the position of each record in each epoch, and each rank's share of it.

A pure function of (seed, epoch, position). It doesn't know the number of threads, the interruptions
of a run or, until a global batch is shared out, the number of ranks or their speeds: batch t holds
the same records for 1, 2 or 7 of them, and a run resumes in the middle of an epoch at a given step.

    epoch    |<------------------- samples ------------------->|     a permutation of the records
    batches  |    step 0    |    step 1    |    step 2    | 3  |     the short last one is trained
    shares   | r0 | r1 | r2 | r0 | r1 | r2 | r0 | r1 | r2 |..  |     contiguous, in rank order

An order is a sort by random keys, words of `splitmix`, one a record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.data import splitmix
from paceline.data.batch_slice import BatchSlice
from paceline.data.shares import divide, without_small
from paceline.errors import ConfigError

Indices = npt.NDArray[np.int64]

# Purposes of random streams: the two know nothing of each other.
# A checkpoint's position means an order: these numbers
# never change, and no other stream takes them.
_ORDER = 1
_AUGMENT = 2


@dataclass(frozen=True, kw_only=True)
class Order:
    """Sample order: the order in which each epoch reads the records of a source.

    Attributes:
        size: number of records of the source.
        batch_size: number of samples per global batch, over all ranks.
        seed: seed of the order; different seeds give different orders.
        epoch_size: number of samples per epoch. If it is below `size`, each epoch takes a different
            subset. None, or a value above `size`: all records.
        shuffle: whether each epoch has a random order. If False, each epoch reads the first
            records in their stored order, as evaluation does.

    Raises:
        ConfigError: `size`, `batch_size` or `epoch_size` is below 1.
    """

    size: int
    batch_size: int
    seed: int = 0
    epoch_size: int | None = None
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError("the database holds no records")
        if self.batch_size < 1:
            raise ConfigError(f"batch_size is {self.batch_size}; it must be at least 1")
        if self.epoch_size is not None and self.epoch_size < 1:
            raise ConfigError(f"epoch_size is {self.epoch_size}; it must be at least 1")

    @property
    def records(self) -> int:
        """The number of records of the source."""
        return self.size

    @property
    def samples(self) -> int:
        """Count the samples of an epoch."""
        return self.size if self.epoch_size is None else min(self.epoch_size, self.size)

    @property
    def steps(self) -> int:
        """Count the global batches of an epoch, the short last one included."""
        return -(-self.samples // self.batch_size)

    def epoch_indices(self, epoch: int) -> Indices:
        """List the records of an epoch in their order, no record twice, shape (samples,)."""
        if not self.shuffle:
            return np.arange(self.samples, dtype=np.int64)
        # No two words of a stream are equal, so that any sort gives the same order.
        keys = splitmix.stream(splitmix.base(self.seed, _ORDER, epoch), self.size)
        return np.argsort(keys)[: self.samples].astype(np.int64, copy=False)

    def transform_keys(self, indices: Indices, positions: Indices) -> Indices:
        """Return what a sample's random transforms in an epoch depend on, shape (n,).

        Args:
            indices: (n,) the samples' records.
            positions: (n,) their positions in the epoch's order.
        """
        return indices

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint has of it, by name."""
        return asdict(self)

    def place(
        self,
        epoch: int,
        step: int,
        rank: int,
        world_size: int,
        shares: Sequence[int] | None = None,
        min_slice: int = 1,
    ) -> BatchSlice:
        """Return a rank's share of a global batch.

        Shares are contiguous and in rank order. By default they differ by one sample at most: the
        first ranks take the larger ones. Where a batch has fewer samples than ranks, the last
        shares are empty.

        Args:
            step: the step's number within the epoch.
            world_size: number of ranks.
            shares: (world_size,) proportions in which the batch is divided (`divide`); None: equal.
            min_slice: the smallest number of samples of a share that isn't empty.

        Raises:
            IndexError: the epoch has no such step, or the world no such rank.
        """
        if not 0 <= step < self.steps:
            raise IndexError(
                f"step {step} doesn't exist: an epoch has {self.steps} steps, numbered from 0"
            )
        if not 0 <= rank < world_size:
            raise IndexError(
                f"rank {rank} doesn't exist: the world has {world_size} ranks, numbered from 0"
            )
        begin = step * self.batch_size
        count = min(self.batch_size, self.samples - begin)
        if shares is None:
            shares = (1,) * world_size
        counts = without_small(divide(count, shares), shares, min_slice)
        cuts = tuple(accumulate(counts, initial=begin))
        return BatchSlice(
            epoch=epoch, step=step, steps=self.steps, rank=rank, cuts=cuts, min_slice=min_slice
        )


def uniforms(seed: int, epoch: int, samples: Indices, count: int) -> npt.NDArray[np.float64]:
    """Draw `count` numbers in [0, 1) for each sample, shape (len(samples), count).

    A row depends on the seed, the epoch and its sample's number only, never on who draws it or
    beside which others. It knows nothing of the order.
    """
    words = splitmix.streams(splitmix.base(seed, _AUGMENT, epoch), samples, count)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53  # 53 bits fill a float64 exactly
