"""Batches of a user's map-style data set, in the order that `Order` gives.

    Order --> this rank's share of each global batch --> torch's DataLoader, its workers and
                                                         collation --> (BatchSlice, batch)

The batch of a place depends on the data set, the seed, the epoch and the place, never on the number
of workers, on the world's size or on where an epoch was begun. Samples are seeded one by one
(`paceline.data.seeded_dataset`).

Worker processes are asked for batches ahead. Where the ranks' shares change meanwhile, the batches
asked for since are asked for again, with the new shares; the old ones are dropped:

    asked for   7 8 9 | 7' 8' 9'        step 7 is to begin with new shares
    yielded           | 7' 8' 9'

Worker processes are forked, as torch's are on Linux: any data set does, and no script needs a
`__main__` guard. Python 3.12 warns of forks beside threads; these children touch neither the
threads' locks nor the exchange. `multiprocessing_context="forkserver"` starts them from a clean
process instead, for a data set that can be pickled.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from paceline.data import splitmix
from paceline.data.batch_slice import BatchSlice
from paceline.data.order import Indices, Order
from paceline.data.result_queue import as_context
from paceline.data.seeded_dataset import AskedSample, MapStyle, SeededDataset
from paceline.errors import ConfigError, DataError

_END = object()  # after the last batch
_WORKERS = 5  # a purpose: the seeds of worker processes, from which only collation may draw


class MappedLoader:
    """Loader of one rank's batch slices of a map-style data set.

    Args:
        dataset: map-style data set, whose samples are numbered from 0 to its length - 1.
        order: the order of the samples in each epoch; its `records` must be the data set's length.
        rank_and_size: returns this rank, and the number of ranks that share a global batch; asked
            when an epoch begins.
        shares: returns the proportions in which the ranks divide the global batch of a step, by the
            step's number in the run; None: equally. Asked when the step's batch is yielded.
        min_slice: returns the smallest number of samples of a slice that isn't empty; asked
            likewise.
        num_workers: number of worker processes that load samples; 0: this process loads them.
        collate: makes a batch from a list of samples; None: torch's default collation.
        pin_memory: whether batches are put into pinned memory, from which copies to a GPU are fast;
            without a GPU it has no effect.
        prefetch_factor: number of batches that each worker process prepares in advance.
        multiprocessing_context: start method of the worker processes: "fork", "forkserver" or
            "spawn".
        timeout: the longest time to wait for a batch from the worker processes, in seconds.

    Raises:
        ConfigError: the data set has no length or no numbered samples, its length differs from the
            order's size, or `num_workers` is negative.
    """

    def __init__(
        self,
        dataset: MapStyle,
        order: Order,
        *,
        rank_and_size: Callable[[], tuple[int, int]],
        shares: Callable[[int], Sequence[int] | None] = lambda number: None,
        min_slice: Callable[[], int] = lambda: 1,
        num_workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        prefetch_factor: int = 2,
        multiprocessing_context: str = "fork",
        timeout: float = 600.0,
    ) -> None:
        _check(dataset, order, num_workers)
        self._dataset = SeededDataset(dataset, order.seed)
        self._order = order
        self._rank_and_size = rank_and_size
        self._shares = shares
        self._min_slice = min_slice
        self._options: dict[str, Any] = {
            "collate_fn": collate,
            "pin_memory": pin_memory and torch.cuda.is_available(),
            "num_workers": num_workers,
        }
        if num_workers:
            self._options |= {
                "prefetch_factor": prefetch_factor,
                "multiprocessing_context": as_context(multiprocessing_context),
                "timeout": timeout,
            }

    def epoch(
        self, epoch: int, first_step: int = 0
    ) -> Generator[tuple[BatchSlice, Any], None, None]:
        """Yield this rank's batch of each step of an epoch from a step on, and its place.

        If a slice is empty, the batch is a placeholder sample, and its `count` is 0. Closing the
        iterator, or leaving the loop that owns it, ends the worker processes.

        Raises:
            ConfigError: the data set has another length than when the loader was made.
            DataError: a worker process ended, or took too long, or a batch can't be sent from it.
                What the data set itself raises comes through as it is.
        """
        self._dataset.require_length(self._order.records)
        order = self._order
        workers = self._options["num_workers"]
        asked = _Asked(self, order, epoch, range(first_step, order.steps))
        with self._batches(asked, epoch) as batches:
            for step in range(first_step, order.steps):
                place = asked.place(step)
                asked.require(place)
                made = None
                # Batches that were asked for with the old shares come first, and are dropped.
                while made != place:
                    with as_data_errors(workers):
                        batch = next(batches)
                    made = asked.places.popleft()
                yield place, batch

    def rank_and_size(self) -> tuple[int, int]:
        """Return this rank, and the number of ranks that share a global batch."""
        return self._rank_and_size()

    def place(self, epoch: int, step: int, rank: int, world_size: int) -> BatchSlice:
        """Return a rank's present slice of a step's batch."""
        shares = self._shares(epoch * self._order.steps + step)
        return self._order.place(epoch, step, rank, world_size, shares, self._min_slice())

    def samples(self, epoch: int, positions: Iterable[Indices]) -> Generator[Any, None, None]:
        """Yield a batch of the samples at some positions of an epoch's order, for each of several.

        Args:
            positions: (n,) positions of each batch.

        Raises:
            ConfigError, DataError: as `epoch`.
        """
        self._dataset.require_length(self._order.records)
        indices = self._order.epoch_indices(epoch)
        asked = (_asked(self._order, epoch, indices[each], each) for each in positions)
        with self._batches(asked, epoch) as batches:
            while True:
                with as_data_errors(self._options["num_workers"]):
                    batch = next(batches, _END)
                if batch is _END:
                    return
                yield batch

    @contextmanager
    def _batches(self, asked: Iterable[list[AskedSample]], epoch: int) -> Iterator[Iterator[Any]]:
        """Open torch's DataLoader, which yields a batch of each list of samples."""
        workers = self._options["num_workers"]
        loader = DataLoader(
            self._dataset,
            batch_sampler=asked,
            # Torch draws the workers' seeds from this, and not from the caller's own stream.
            generator=torch.Generator().manual_seed(
                splitmix.base(self._order.seed, _WORKERS, epoch)
            ),
            **self._options,
        )
        batches = begun(loader)
        try:
            yield batches
        finally:
            if workers:
                # What torch itself calls, but only once nothing refers to `batches` any more, and
                # an error's traceback does.
                with as_data_errors(workers):
                    batches._shutdown_workers()


class _Asked:
    """Batches that torch's DataLoader is asked for, as its batch sampler.

    Args:
        loader: knows this rank's present slice of a step's batch.
        order: the order of the samples.
        steps: the steps to ask for.

    Attributes:
        places: the batches asked for and not yet yielded, in their order.
    """

    def __init__(self, loader: MappedLoader, order: Order, epoch: int, steps: range) -> None:
        self._loader = loader
        self._order = order
        self._epoch = epoch
        self._indices = order.epoch_indices(epoch)
        # Of the epoch, which is divided among these ranks to its end.
        self._rank_and_size = loader.rank_and_size()
        self._steps = steps
        self.places: deque[BatchSlice] = deque()
        self._next = steps.start

    def __iter__(self) -> Iterator[list[AskedSample]]:
        return self

    def __next__(self) -> list[AskedSample]:
        """Ask for the next step's batch."""
        if self._next >= self._steps.stop:
            raise StopIteration
        place = self.place(self._next)
        self._next += 1
        self.places.append(place)
        positions = np.arange(place.computed.start, place.computed.stop)
        return _asked(self._order, place.epoch, self._indices[place.computed], positions)

    def place(self, step: int) -> BatchSlice:
        """Return this rank's present slice of a step's batch."""
        return self._loader.place(self._epoch, step, *self._rank_and_size)

    def require(self, place: BatchSlice) -> None:
        """Ask again from a step on, if its batch was asked for with other shares."""
        if self.places and self.places[0] != place:
            self._next = place.step


def _asked(order: Order, epoch: int, indices: Indices, positions: Indices) -> list[AskedSample]:
    """Return what the data set is asked for of samples at some positions of an epoch's order."""
    keys = order.transform_keys(indices, positions)
    return [(epoch, index, key) for index, key in zip(indices.tolist(), keys.tolist(), strict=True)]


def _check(dataset: MapStyle, order: Order, num_workers: int) -> None:
    name = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise ConfigError(
            f"{name} makes its own batches, and every rank would get all of them: pass its data "
            "set (loader.dataset), and its sampler, if it isn't torch's default, as sampler=; "
            "Paceline makes the batches."
        )
    numbered = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not numbered:
        raise ConfigError(
            f"{name} is not a map-style data set: a rank selects its samples by number, for which "
            "it needs `__len__` and `__getitem__`. Pass a data set that has both, or iterate over "
            "your own DataLoader and make each step with world.step(samples=n), where n is the "
            "number of samples in this rank's batch."
        )
    if len(dataset) != order.records:
        raise ConfigError(
            f"{name} has {len(dataset)} samples, but the order has {order.records}: make the order "
            "with the data set's length."
        )
    if num_workers < 0:
        raise ConfigError(f"num_workers is {num_workers}; it must be at least 0.")


def begun(loader: DataLoader[Any]) -> Any:
    """Return a DataLoader's iterator, whose processes are forked beside this one's threads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        return iter(loader)


@contextmanager
def as_data_errors(workers: int) -> Iterator[None]:
    """Turn what torch itself says of its processes into an error of data.

    Torch reports a process that dies, or a connection to it ends. Errors of the data set
    name the process that they come from, and stay what they are.
    """
    try:
        yield
    except (RuntimeError, OSError, EOFError) as error:
        said, *_ = str(error).split(". ")
        ended = isinstance(error, OSError | EOFError) and "in DataLoader worker" not in said
        if not workers or not (said.startswith("DataLoader ") or ended):
            raise
        # The path or the peer of a connection to a process is nothing that a user knows.
        unknown = isinstance(error, FileNotFoundError | ConnectionError | EOFError)
        raise _data_error("" if unknown else said) from error


def explained_death(error: BaseException) -> BaseException:
    """Return an error, or an error of data where it reports a dead worker of a DataLoader.

    Torch raises that one in a signal's handler: in whatever line the main thread executes.
    """
    said, *_ = str(error).split(". ")
    if isinstance(error, RuntimeError) and said.startswith("DataLoader worker (pid"):
        return _data_error(said)
    return error


def _data_error(said: str) -> DataError:
    return DataError(
        f"{said or 'A connection ended'}: a process that loads data died (out of memory?) or "
        "hangs; try num_workers=0 to see why."
    )
