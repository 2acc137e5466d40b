"""Batches of one rank's own stream: a user's `IterableDataset`, which has no sample numbers.

    stream ──▶ torch's DataLoader, its workers and collation ──▶ (count, batch), (count, batch), …

A batch's count is its real number of samples: the last one of the stream, and of each worker
process, may have fewer. In this process, what a data set draws at random for a batch depends on
the seed, the epoch, the rank and the batch's number. So a stream that is read again from its
beginning yields the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import default_collate

from paceline.data import splitmix
from paceline.data.map_style_loader import as_data_errors, begun
from paceline.data.result_queue import as_context
from paceline.data.seeded_dataset import kept_streams, seed_streams

_WORKERS = 6  # purposes of random streams
_IN_PROCESS = 7
_TIMEOUT_S = 600.0  # the longest wait for a batch of the worker processes


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Stream of batches of one rank.

    Attributes:
        dataset: the rank's data set.
        batch_size: number of samples of a full batch of this rank.
        seed: seed of random numbers.
        drop_last: leave out batches with fewer samples.
        num_workers: number of worker processes; 0: this process loads.
        collate: makes a batch from a list of samples; None: torch's default collation.
        pin_memory: whether batches are put into pinned memory, where there is a GPU.
    """

    dataset: IterableDataset[Any]
    batch_size: int
    seed: int
    drop_last: bool = False
    num_workers: int = 0
    collate: Callable[[list[Any]], Any] | None = None
    pin_memory: bool = False

    def batches(self, epoch: int, rank: int) -> Generator[tuple[int, Any], None, None]:
        """Yield an epoch's batches, each with its number of samples; closing it ends the workers.

        Raises:
            DataError: a worker process ended, or took too long. What the data set itself raises
                comes through as it is.
        """
        options: dict[str, Any] = {}
        if self.num_workers:
            options = {"multiprocessing_context": as_context("fork"), "timeout": _TIMEOUT_S}
        base = splitmix.base(self.seed, _WORKERS, epoch, rank)
        loader = DataLoader(
            self.dataset,
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            num_workers=self.num_workers,
            collate_fn=partial(_counted, self.collate or default_collate),
            pin_memory=self.pin_memory and torch.cuda.is_available(),
            generator=torch.Generator().manual_seed(base),
            **options,
        )
        number = 0
        batches = None
        try:
            while True:
                seed = splitmix.base(self.seed, _IN_PROCESS, epoch, rank, number)
                # The script's own random streams must not depend on what the data set draws.
                with as_data_errors(self.num_workers), kept_streams():
                    seed_streams(seed)
                    if batches is None:
                        batches = begun(loader)
                    batch = next(batches, None)
                if batch is None:
                    return
                yield batch
                number += 1
        finally:
            if self.num_workers and batches is not None:
                with as_data_errors(self.num_workers):
                    batches._shutdown_workers()  # an error's traceback may refer to them


def _counted(collate: Callable[[list[Any]], Any], samples: list[Any]) -> tuple[int, Any]:
    # Counted here, because a collate_fn may return anything, from which no number can be read.
    return len(samples), collate(samples)
