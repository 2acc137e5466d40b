"""`loader`: the global batches of a data set, each sliced among the ranks, in a resumable order.

    for epoch in range(loader.epoch, EPOCHS):       from the epoch in which the run resumes
        for x, y in loader:                         this rank's slice of each global batch
            with world.step(): …

The samples of a batch depend on the seed and the epoch, not on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any

from paceline.api.argument_names import errors_name_arguments
from paceline.api.world import World
from paceline.data.map_style_loader import MappedLoader
from paceline.data.order import Order
from paceline.data.seeded_dataset import MapStyle
from paceline.errors import ConfigError


class Loader:
    """Data loader that yields this rank's slice of each global batch; `paceline.loader` makes it.

    Each iteration is an epoch. The first iteration of a resumed run begins at the position of the
    checkpoint. A `break` ends the epoch; the next iteration begins the next epoch. In a notebook,
    the iteration after one that an error or an interrupt ended continues its epoch.
    """

    def __init__(self, mapped: MappedLoader, order: Order, world: World, *, train: bool) -> None:
        self._mapped, self._order, self._world = mapped, order, world
        self._train = train
        self._step, self._count = 0, 0

    @property
    def epoch(self) -> int:
        """The active epoch, or the one that the next iteration begins; 0 for evaluation."""
        return self._world.epoch if self._train else 0

    @property
    def step(self) -> int:
        """The index of the current batch in its epoch, from 0."""
        return self._step

    @property
    def count(self) -> int:
        """The number of this rank's samples in the current batch.

        It is 0 where the batch has fewer samples than ranks: the one sample yielded has no weight.
        """
        return self._count

    @property
    def steps(self) -> int:
        """The number of global batches of an epoch."""
        return self._order.steps

    @property
    def samples(self) -> int:
        """The number of samples of an epoch, over all ranks."""
        return self._order.samples

    def __len__(self) -> int:
        """Return the number of global batches of an epoch."""
        return self.steps

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's slice of each global batch.

        Raises:
            ConfigError: no step trained the last batches, or the world is closed.
            DataError: a worker process that loads data died or hangs.
            SystemExit: this process, or another, received a signal to stop; the state is saved.
        """
        return self._training_batches() if self._train else self._evaluation_batches()

    def _training_batches(self) -> Iterator[Any]:
        first: int | None = self._world._loop.begin_epoch()
        try:
            while first is not None:
                first = yield from self._batches_from(first)
        finally:
            self._world._position.end_iteration(complete=first is None)

    def _batches_from(self, first: int) -> Generator[Any, None, int | None]:
        """Yield the epoch's batches; return the step from which the next generation continues."""
        world = self._world
        with closing(self._mapped.epoch(world.epoch, first)) as batches:
            for batch_slice, batch in batches:
                self._step, self._count = batch_slice.step, batch_slice.count
                world._loop.queue_slice(batch_slice)
                yield batch
                if world._loop.rollback.error is not None:
                    return world._loop.rollback.go_back()
        return world._loop.end_steps()

    def _evaluation_batches(self) -> Iterator[Any]:
        """Skip empty slices: in an evaluation no rank waits for another."""
        for batch_slice, batch in self._mapped.epoch(0):
            self._step, self._count = batch_slice.step, batch_slice.count
            if batch_slice.count:
                yield batch


def loader(
    dataset: MapStyle,
    batch_size: int,
    world: World,
    *,
    train: bool = True,
    shuffle: bool | None = None,
    seed: int | None = None,
    num_workers: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    pin_memory: bool = False,
) -> Loader:
    """Slice the global batches of a data set among the ranks; collective.

    Args:
        dataset: any map-style data set, the same on all ranks.
        batch_size: the number of samples of a global batch, over all ranks.
        world: whose ranks share the batches.
        train: the batches are for `world.step()` and define the position of the run. A world has
            one such loader. Other loaders are for evaluation: they yield each sample once, on one
            rank, and a rank without a sample of a batch skips that batch.
        shuffle: permute the samples anew in each epoch; by default only to train.
        seed: of the order and of the data set's random transforms; by default the world's.
        num_workers: the number of processes that load; 0 loads in this one.
        collate_fn: makes a batch from a list of samples; by default torch's.
        pin_memory: put batches into pinned memory, from which copies to a GPU are fast.

    Raises:
        ConfigError: the data set isn't map-style or is empty, a number is too small, or the ranks
            or the checkpoint have other values.
        CommError: a peer is silent.
    """
    with errors_name_arguments():
        world._end.require_open("paceline.loader()")
        size = len(dataset) if hasattr(dataset, "__len__") else 1
        if size == 0:
            raise ConfigError(f"the data set ({type(dataset).__name__}) is empty.")
        order = Order(
            size=size,
            batch_size=batch_size,
            seed=world._session.seed if seed is None else seed,
            shuffle=train if shuffle is None else shuffle,
        )
        mapped = MappedLoader(
            dataset,
            order,
            rank_and_size=world._run.rank_and_size,
            num_workers=num_workers,
            collate=collate_fn,
            pin_memory=pin_memory,
        )
        _require_equal_orders(order, world, train=train)
        if train:
            world._position.use_order(order)
    return Loader(mapped, order, world, train=train)


def _require_equal_orders(order: Order, world: World, *, train: bool) -> None:
    """Require the same loader on all ranks; collective."""
    facts = {
        "the data set's length": order.size,
        "batch_size": order.batch_size,
        "seed of the loader": order.seed,
        "shuffle": order.shuffle,
        "train": train,
    }
    world._loop.loaders += 1
    world._session.require_equal(f"loader {world._loop.loaders}", facts)
