"""`loader`: a data set's batches, cut up among the ranks, in an order that outlives a stop.

    for epoch in range(loader.epoch, EPOCHS):       where the run goes on
        for x, y in loader:                         this rank's share of each global batch
            with world.step(): …

Which samples are in a batch depends on the seed and the epoch, not on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from paceline.api.argument_names import in_python
from paceline.api.world import World
from paceline.data.map_style_loader import MappedLoader
from paceline.data.order import Order
from paceline.data.seeded_dataset import MapStyle
from paceline.errors import ConfigError


class Loader:
    """This rank's shares of a data set's global batches; made by `paceline.loader`.

    Each iteration over it is an epoch; the first one of a run that goes on begins where the
    checkpoint was made. A loop that is left by `break` ends its epoch; the next one begins another.
    """

    def __init__(self, mapped: MappedLoader, order: Order, world: World, *, train: bool) -> None:
        self._mapped, self._order, self._world = mapped, order, world
        self._train = train
        self._step, self._count = 0, 0

    @property
    def epoch(self) -> int:
        """The epoch that runs, or that the next iteration is; 0 for evaluation."""
        return self._world.epoch if self._train else 0

    @property
    def step(self) -> int:
        """The number of the present batch in its epoch, from 0."""
        return self._step

    @property
    def count(self) -> int:
        """How many samples of the present batch count: 0 for the sample of an empty share."""
        return self._count

    @property
    def steps(self) -> int:
        """The global batches of an epoch."""
        return self._order.steps

    @property
    def samples(self) -> int:
        """The samples of an epoch, over all ranks."""
        return self._order.samples

    def __len__(self) -> int:
        """Count the global batches of an epoch."""
        return self.steps

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's share of each global batch.

        Raises:
            ConfigError: batches of a loader that trains were left out, or the world is closed.
            DataError: a process that loads data died, or hangs.
            SystemExit: this process, or another, was asked to stop; the state is saved.
        """
        return self._trained() if self._train else self._evaluated()

    def _trained(self) -> Iterator[Any]:
        training = self._world._training
        epoch, first = training.begin_epoch()
        try:
            for place, batch in self._mapped.epoch(epoch, first):
                self._step, self._count = place.step, place.count
                training.hand_out(place)
                yield batch
            training.end_steps()
        finally:
            training.position.iterating = False

    def _evaluated(self) -> Iterator[Any]:
        """Leave out empty shares: in an evaluation nobody waits for this rank."""
        for place, batch in self._mapped.epoch(0):
            self._step, self._count = place.step, place.count
            if place.count:
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
    """Cut a data set into global batches, and those into shares, one a rank; collective.

    Args:
        dataset: any map-style data set, the same on all ranks.
        batch_size: samples of a global batch, over all ranks.
        world: whose ranks share them.
        train: its batches are for `world.step()`, and say where the run stands; one loader of a
            world does. Otherwise it is for evaluation: each sample comes once, on one rank, and a
            rank without a sample of a batch passes over it.
        shuffle: mix the samples anew in each epoch; by default, to train.
        seed: of the order and of what the data set draws; by default the world's.
        num_workers: processes that load; 0 loads in this one.
        collate_fn: makes a batch of a list of samples; by default torch's.
        pin_memory: leave batches in memory from which copies to a GPU are fast.

    Raises:
        ConfigError: the data set isn't map-style or is empty, a number is too small, or the ranks
            or the checkpoint have something else.
        CommError: a peer said nothing in time.
    """
    with in_python():
        world._training.require_open("paceline.loader()")
        size = len(dataset) if hasattr(dataset, "__len__") else 1
        if size == 0:
            raise ConfigError(f"the data set ({type(dataset).__name__}) is empty: give samples.")
        order = Order(
            size=size,
            batch_size=batch_size,
            seed=world._session.identity["seed"] if seed is None else seed,
            shuffle=train if shuffle is None else shuffle,
        )
        mapped = MappedLoader(
            dataset,
            order,
            rank=world.rank,
            world_size=world.world_size,
            num_workers=num_workers,
            collate=collate_fn,
            pin_memory=pin_memory,
        )
        world._training.follow(order, train=train)
    return Loader(mapped, order, world, train=train)
