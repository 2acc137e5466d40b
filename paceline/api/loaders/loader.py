"""`loader`: the global batches of a data set, each sliced among the ranks, in a resumable order.

    for epoch in range(loader.epoch, EPOCHS):       from the epoch in which the run resumes
        for x, y in loader:                         this rank's slice of each global batch
            with world.step(): …

The samples of a batch depend on the seed and the epoch, not on the number of ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any, overload

from torch.utils.data import IterableDataset

from paceline.api.argument_names import errors_name_arguments, print_message_for_scripts
from paceline.api.loaders.evaluation import Evaluation
from paceline.api.loaders.stream_loader import UNEVEN, CurrentBatch, StreamLoader
from paceline.api.world import World, require_world
from paceline.comm.communicator import gather_bytes, gather_counts
from paceline.data.batch_count import samples_in
from paceline.data.dataset_checksum import dataset_checksum
from paceline.data.drawn_order import DrawnOrder, SamplerDraws, WeightedSampler
from paceline.data.map_style_loader import MappedLoader
from paceline.data.order import Order
from paceline.data.seeded_dataset import MapStyle
from paceline.data.stream import Stream
from paceline.errors import ConfigError
from paceline.replica.checksums import name_ranks
from paceline.timeline.timeline import WAIT_FOR_INPUT


class Loader(CurrentBatch):
    """Data loader that yields this rank's slice of each global batch; `paceline.loader` makes it.

    Each iteration is an epoch. The first iteration of a resumed run begins at the position of the
    checkpoint. A `break` ends the epoch; the next iteration begins the next epoch. In a notebook,
    the iteration after one that an error or an interrupt ended continues its epoch.
    """

    def __init__(
        self, mapped: MappedLoader, order: Order, world: World, *, train: bool, collates: bool
    ) -> None:
        super().__init__(world, train=train, collates=collates)
        self._mapped = mapped
        self._order = order

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
            for batch_slice, batch in world._run.timeline.each(WAIT_FOR_INPUT, batches):
                self._step = batch_slice.step
                self._count = batch_slice.count
                found = batch_slice.count
                if self._collates and found:
                    found = samples_in(batch, found)
                world._loop.queue_slice(batch_slice, found)
                yield batch
                rollback = world._loop.rollback
                if rollback.error is not None or rollback.moved:
                    return rollback.continue_steps()
        return world._loop.end_steps()

    def _surviving_batches(self) -> Iterator[Any]:
        """Yield the batches of an evaluation, as `World.evaluation` says."""
        world = self._world
        if self._train:
            raise ConfigError(
                "world.evaluation() got the training loader: pass a paceline.loader() with "
                "train=False."
            )
        if not world._loop.rollback.possible:  # a loss ends the run
            return self._metered_batches()
        return Evaluation(world._loop, world._run, self._mapped, self._order, self).batches()

    def _metered_batches(self) -> Iterator[Any]:
        """Yield the batches of an evaluation, and merge the meters' sums at the end."""
        context = self._world._run.context
        meters = self._world._loop.meters
        with meters.evaluate():
            yield from self._evaluation_batches()
        if meters.count:
            with context.activities.call("the end of world.evaluation()"):
                what = "the end of world.evaluation(), which all ranks must reach"
                meters.merge(gather_bytes(context.group("data", "steps"), meters.pack(), what))

    def _evaluation_batches(self) -> Iterator[Any]:
        """Skip empty slices: in an evaluation no rank waits for another."""
        for batch_slice, batch in self._mapped.epoch(0):
            self._note(batch_slice.step, batch_slice.count)
            if batch_slice.count:
                yield batch
        self._world._loop.evaluated += 1


@overload
def loader(
    dataset: MapStyle,
    batch_size: int,
    world: World,
    *,
    train: bool = True,
    shuffle: bool | None = None,
    seed: int | None = None,
    drop_last: bool = False,
    num_workers: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    pin_memory: bool = False,
    uneven: str = "join",
    sampler: Iterable[Any] | None = None,
    weights: Any = None,
    batch_sampler: None = None,
) -> Loader: ...


@overload
def loader(
    dataset: IterableDataset[Any],
    batch_size: int,
    world: World,
    *,
    train: bool = True,
    shuffle: None = None,
    seed: int | None = None,
    drop_last: bool = False,
    num_workers: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    pin_memory: bool = False,
    uneven: str = "join",
    sampler: Iterable[Any] | None = None,
    weights: Any = None,
    batch_sampler: None = None,
) -> StreamLoader: ...


def loader(
    dataset: MapStyle | IterableDataset[Any],
    batch_size: int,
    world: World,
    *,
    train: bool = True,
    shuffle: bool | None = None,
    seed: int | None = None,
    drop_last: bool = False,
    num_workers: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    pin_memory: bool = False,
    uneven: str = "join",
    sampler: Iterable[Any] | None = None,
    weights: Any = None,
    batch_sampler: None = None,
) -> Loader | StreamLoader:
    """Slice the global batches of a data set among the ranks; collective.

    Args:
        dataset: any map-style data set, the same on all ranks; or an `IterableDataset` that yields
            this rank's own part of the samples.
        batch_size: the number of samples of a global batch, over all ranks.
        world: whose ranks share the batches.
        train: the batches are for `world.step()` and define the position of the run. A world has
            one such loader. Other loaders are for evaluation: they yield each sample once, on one
            rank, and a rank without a sample of a batch skips that batch.
        shuffle: permute the samples anew in each epoch; by default only to train.
        seed: of the order and of the data set's random transforms; by default the world's.
        drop_last: leave out an epoch's last batch if it has fewer than `batch_size` samples. With
            `shuffle`, other samples are left out in each epoch. By default all are used.
        num_workers: the number of processes that load; 0 loads in this one.
        collate_fn: makes a batch from a list of samples; by default torch's.
        pin_memory: put batches into pinned memory, from which copies to a GPU are fast.
        uneven: what ranks do when streams end unevenly: "join", go on to the end of the longest,
            where a rank whose stream has ended counts nothing; or "shortest", stop all when the
            first one ends. A map-style data set never ends unevenly.
        sampler: draws the samples' numbers of each epoch, in place of `shuffle`; of a map-style
            data set. Rank 0 draws them once an epoch and sends them to all. An epoch has as many
            samples as it draws, of which two may be the same; the number stays. The ledger counts
            the positions in this order. torch's random stream, and the sampler's `generator`, are
            seeded anew for each epoch, and `set_epoch` is called if there is one.
        weights: (samples,) finite numbers, at least 0: in each epoch, as many samples as the data
            set has are drawn with replacement, in proportion to them; in place of `sampler`.
        batch_sampler: refused, because Paceline makes the batches.

    Raises:
        ConfigError: the data set isn't map-style or is empty, a number is too small, the sampler
            can't be used, or the ranks or the checkpoint have other values.
        CommError: a peer is silent.
    """
    require_world(world, "paceline.loader()")
    activities = world._run.context.activities
    with errors_name_arguments(), activities.call("paceline.loader()"):
        world._end.require_open("paceline.loader()")
        batch_size = _checked_batch_size(batch_size)
        if uneven not in UNEVEN:
            raise ConfigError(f"uneven is {uneven!r}; it must be one of {', '.join(UNEVEN)}.")
        _check_sampler(dataset, sampler, weights, batch_sampler, shuffle)
        if isinstance(dataset, IterableDataset):
            if shuffle is not None:
                raise ConfigError(
                    "shuffle was given for an IterableDataset, which has its own order: shuffle in "
                    "its __iter__, or pass a map-style data set."
                )
            stream = Stream(
                dataset=dataset,
                batch_size=_own_batch_size(batch_size, world),
                seed=world._session.seed if seed is None else seed,
                drop_last=drop_last,
                num_workers=num_workers,
                collate=collate_fn,
                pin_memory=pin_memory,
            )
            return _stream_loader(stream, batch_size, world, train=train, uneven=uneven)
        size = len(dataset) if hasattr(dataset, "__len__") else 1
        if size == 0:
            raise ConfigError(f"the data set ({type(dataset).__name__}) is empty.")
        chosen_seed = world._session.seed if seed is None else seed
        shuffled = train if shuffle is None else shuffle
        if weights is not None:
            sampler = WeightedSampler(weights, size)
        draws = None if sampler is None else SamplerDraws(sampler, size, chosen_seed)
        facts = {
            "the data set's length": size,
            "batch_size": batch_size,
            "seed of the loader": chosen_seed,
            "shuffle": shuffled,
            "drop_last": drop_last,
            "train": train,
            "sampler": None if sampler is None else type(sampler).__name__,
        }
        _require_equal(world, facts)
        _compare_data(world, dataset)
        order: Order
        if draws is None:
            order = Order(
                size=size,
                batch_size=batch_size,
                seed=chosen_seed,
                shuffle=shuffled,
                epoch_size=_full_batches(size, batch_size) if drop_last else None,
            )
        else:
            places = _draw_first(draws, world, train=train)
            order = DrawnOrder(
                size=places,
                source=size,
                batch_size=batch_size,
                seed=chosen_seed,
                epoch_size=_full_batches(places, batch_size) if drop_last else None,
                draws=draws,
            )
        loop = world._loop
        mapped = MappedLoader(
            dataset,
            order,
            rank_and_size=world._run.rank_and_size,
            shares=loop.shares if train else lambda number: loop.present_shares(),
            min_slice=(lambda: loop.min_slice) if train else lambda: 1,
            num_workers=num_workers,
            collate=collate_fn,
            pin_memory=pin_memory,
        )
        if train:
            world._position.use_order(order)
    return Loader(mapped, order, world, train=train, collates=collate_fn is not None)


def _check_sampler(
    dataset: object,
    sampler: object | None,
    weights: object | None,
    batch_sampler: object | None,
    shuffle: bool | None,
) -> None:
    """Refuse arguments of which one leaves another without an effect."""
    if batch_sampler is not None:
        raise ConfigError(
            "batch_sampler was given, but paceline.loader makes the batches, and divides them "
            "among the ranks: pass batch_size=, and a sampler of single samples as sampler=."
        )
    given = [name for name, one in (("sampler", sampler), ("weights", weights)) if one is not None]
    if len(given) > 1:
        raise ConfigError("sampler and weights were given, which both draw the samples: pass one.")
    if given and isinstance(dataset, IterableDataset):
        raise ConfigError(
            f"{given[0]} was given for an IterableDataset, which has its own order: choose the "
            "samples in its __iter__, or pass a map-style data set."
        )
    if given and shuffle is not None:
        raise ConfigError(
            f"{given[0]} and shuffle were given, but {given[0]} defines the order: leave shuffle "
            "out."
        )


def _draw_first(draws: SamplerDraws, world: World, *, train: bool) -> int:
    """Draw the epoch in which the run is, unless the checkpoint has it; return its length.

    Collective.
    """
    if train and world._position.saved_draw is not None:
        draws.load_state_dict(world._position.saved_draw)
    return draws.draw(world.epoch if train else 0, world._run.context.group("data", "steps"))


def _checked_batch_size(batch_size: object) -> int:
    """Return the number of samples of a global batch as an int, also where it is NumPy's."""
    try:
        size = operator.index(batch_size)  # type: ignore[arg-type]  # what has no index raises
    except TypeError:
        size = 0
    if size < 1:
        raise ConfigError(
            f"batch_size is {batch_size!r}: pass a whole number of samples, at least 1, of all "
            "ranks together."
        )
    return size


def _own_batch_size(batch_size: int, world: World) -> int:
    """Return this rank's part of a global batch of streams."""
    rank, ranks = world._run.rank_and_size()
    each, larger = divmod(batch_size, ranks)
    if each < 1:
        raise ConfigError(
            f"batch_size is {batch_size}, but each of the {ranks} ranks reads its own "
            f"stream: pass at least {ranks}, the number of samples over all ranks."
        )
    return each + (rank < larger)


def _stream_loader(
    stream: Stream, batch_size: int, world: World, *, train: bool, uneven: str
) -> StreamLoader:
    facts: dict[str, object] = {
        "batch_size": batch_size,
        "seed": stream.seed,
        "drop_last": stream.drop_last,
        "uneven": uneven,
        "num_workers": stream.num_workers,
    }
    _require_equal(world, {**facts, "kind of data set": "IterableDataset", "train": train})
    if train:
        _, ranks = world._run.rank_and_size()
        world._position.use_stream({**facts, "world_size": ranks})
    return StreamLoader(stream, world, train=train, uneven=uneven)


def _full_batches(size: int, batch_size: int) -> int:
    """Return the number of samples in an epoch's full batches."""
    if 0 < size < batch_size:
        raise ConfigError(
            f"drop_last leaves no batch of a data set of {size} samples with batch_size "
            f"{batch_size}: use a smaller batch_size, or drop_last=False."
        )
    return size // max(batch_size, 1) * batch_size


def _compare_data(world: World, dataset: object) -> None:
    """Say where the ranks' data sets differ, though they are as long; collective."""
    communicator = world._run.context.group("all", "steps")
    if communicator.world_size == 1:
        return
    checksums = gather_counts(communicator, dataset_checksum(dataset), "the ranks' data sets")
    others = [rank for rank, each in enumerate(checksums) if each != checksums[0]]
    if others and communicator.rank == 0:
        print_message_for_scripts(
            f"warning: the data set of paceline.loader() ({type(dataset).__name__}) has other "
            f"samples on {name_ranks(others)} than on rank 0. Each rank trains its part of the "
            "same positions, so some samples are trained twice and others never. Pass all samples, "
            "undivided and in the same order, on all ranks: seed a split or a shuffle, sort what "
            "comes from a set or a folder, and leave it to the loader to divide them."
        )


def _require_equal(world: World, facts: Mapping[str, object]) -> None:
    """Require the same facts of a loader on all ranks; collective."""
    world._loop.loaders += 1
    world._session.agree(f"loader {world._loop.loaders}", facts)
