"""Anybody's data set in our order: the same batches for any world, workers and start."""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from paceline.data.batch_slice import BatchSlice
from paceline.data.map_style_loader import MappedLoader, as_data_errors
from paceline.data.order import Order
from paceline.data.shares import divide
from paceline.errors import ConfigError, DataError
from tests.harness.processes.command import Result, Running

ROOT = Path(__file__).parents[2]
SIZE, BATCH = 23, 5


class Noisy(Dataset[Any]):
    """Samples with random parts from all the streams that transforms draw from."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = (random.random(), float(np.random.rand()), float(torch.rand(())))
        return torch.tensor([index, *drawn], dtype=torch.float64)


class Failing(Noisy):
    """Sample 3 fails as it is told to."""

    def __init__(self, how: str) -> None:
        self._how = how

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 3 and self._how == "dies":
            os._exit(1)
        if index == 3:
            kind = {"key": KeyError, "file": FileNotFoundError, "own": RuntimeError}[self._how]
            raise kind("sample 3 is broken")
        return super().__getitem__(index)


def loader_of(dataset: Any = None, **options: Any) -> MappedLoader:
    dataset = Noisy() if dataset is None else dataset
    order = options.pop("order", None) or Order(size=len(dataset), batch_size=BATCH, seed=3)
    rank_and_size = options.pop("rank", 0), options.pop("world_size", 1)
    return MappedLoader(dataset, order, rank_and_size=lambda: rank_and_size, **options)


def real(batches: Iterator[tuple[BatchSlice, torch.Tensor]]) -> list[torch.Tensor]:
    """The samples of each batch that count."""
    return [batch[: place.count] for place, batch in batches]


def test_an_epoch_is_the_orders_samples_in_their_order() -> None:
    order = Order(size=SIZE, batch_size=BATCH, seed=8)
    for epoch in (0, 4):
        places, batches = zip(*loader_of(order=order).epoch(epoch), strict=True)
        numbers = torch.cat(batches)[:, 0]
        assert numbers.tolist() == order.epoch_indices(epoch).tolist()
        assert list(places) == [order.place(epoch, step, 0, 1) for step in range(order.steps)]
        assert [place.count for place in places] == [5, 5, 5, 5, 3]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_batches_follow_shares_that_change_while_they_are_loaded(workers: int) -> None:
    planned = [(1, 1), (1, 1), (4, 1), (0, 5), (0, 5)]
    alone = real(loader_of().epoch(1))
    ranks = []
    for rank in range(2):
        now = [0]
        loader = loader_of(
            rank=rank,
            world_size=2,
            num_workers=workers,
            shares=lambda number, now=now: planned[now[0]],  # of the step that begins
        )
        batches = []
        for place, batch in loader.epoch(1):
            assert place.step == now[0] == len(batches)
            assert len(batch) == max(1, place.count)
            batches.append(batch[: place.count])
            now[0] = min(now[0] + 1, 4)
        ranks.append(batches)
    for step, whole in enumerate(alone):
        assert torch.equal(torch.cat([rank[step] for rank in ranks]), whole)
        assert len(ranks[0][step]) == divide(len(whole), planned[step])[0]


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_a_global_batch_is_bit_identical_for_any_world(world_size: int) -> None:
    alone = real(loader_of().epoch(1))
    ranks = [real(loader_of(rank=r, world_size=world_size).epoch(1)) for r in range(world_size)]
    for whole, *parts in zip(alone, *ranks, strict=True):
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 1},
        {"num_workers": 2, "prefetch_factor": 1},
        {"num_workers": 2, "multiprocessing_context": "forkserver"},
    ],
)
def test_any_number_of_workers_gives_the_same_bits(options: dict[str, Any]) -> None:
    for (place, ours), (expected, theirs) in zip(
        loader_of(**options).epoch(2), loader_of().epoch(2), strict=True
    ):
        assert place == expected
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("first_step", [1, 4])
def test_an_epoch_begun_in_the_middle_goes_on_with_the_same_bits(
    workers: int, first_step: int
) -> None:
    whole = list(loader_of().epoch(1))
    rest = list(loader_of(num_workers=workers).epoch(1, first_step))
    assert [place.step for place, _ in rest] == list(range(first_step, 5))
    for (place, ours), (expected, theirs) in zip(rest, whole[first_step:], strict=True):
        assert place == expected
        assert torch.equal(ours, theirs)


def test_random_transforms_differ_by_sample_epoch_and_seed() -> None:
    drawn = [
        row
        for seed in (0, 1)
        for epoch in (0, 1)
        for batch in real(
            loader_of(order=Order(size=SIZE, batch_size=BATCH, seed=seed)).epoch(epoch)
        )
        for row in batch[:, 1:].tolist()
    ]
    for column in zip(*drawn, strict=True):
        assert len(set(column)) == 4 * SIZE


@pytest.mark.parametrize("workers", [0, 1])
def test_the_callers_own_random_streams_go_on_as_if_nothing_had_been_loaded(workers: int) -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    def seed() -> None:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)

    seed()
    expected = [draw(), draw()]
    seed()
    found = [draw()]
    real(loader_of(num_workers=workers).epoch(0))
    assert [*found, draw()] == expected


def test_an_empty_share_is_one_borrowed_sample() -> None:
    order = Order(size=7, batch_size=5, shuffle=False)
    dataset = TensorDataset(torch.arange(7), torch.arange(7) % 3)
    batches = list(loader_of(dataset, order=order, rank=3, world_size=4).epoch(0))
    assert [place.count for place, _ in batches] == [1, 0]
    numbers, labels = batches[1][1]
    assert (len(numbers), len(labels)) == (1, 1)
    assert numbers.item() in (5, 6)


def test_batches_are_collated_as_asked() -> None:
    (_, batch), *_ = loader_of([3, 4, 5], collate=tuple, order=Order(size=3, batch_size=3)).epoch(0)
    assert sorted(batch) == [3, 4, 5]
    assert isinstance(batch, tuple)


def by_break(epoch: Iterator[Any]) -> None:
    for _ in epoch:
        break


def by_an_error(epoch: Iterator[Any]) -> None:
    with suppress(ZeroDivisionError):
        for place, _ in epoch:
            print(1 / (place.step - 1))


@pytest.mark.parametrize("leave", [by_break, by_an_error])
def test_leaving_in_the_middle_leaves_no_process_behind(
    leave: Callable[[Iterator[Any]], None],
) -> None:
    before = set(multiprocessing.active_children())
    epoch = loader_of(num_workers=2).epoch(0)
    next(epoch)
    assert len(set(multiprocessing.active_children()) - before) == 2
    leave(epoch)
    del epoch
    assert set(multiprocessing.active_children()) == before


def test_closing_an_epoch_ends_its_processes_while_somebody_refers_to_it() -> None:
    before = set(multiprocessing.active_children())
    epoch: Any = loader_of(num_workers=2).epoch(0)
    next(epoch)
    epoch.close()
    assert set(multiprocessing.active_children()) == before


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("how", "kind"), [("key", KeyError), ("file", FileNotFoundError), ("own", RuntimeError)]
)
def test_an_error_of_the_data_set_comes_through(
    workers: int, how: str, kind: type[Exception]
) -> None:
    before = set(multiprocessing.active_children())
    with pytest.raises(kind, match="sample 3 is broken"):
        real(loader_of(Failing(how), num_workers=workers).epoch(0))
    assert set(multiprocessing.active_children()) == before


def load_from_a_worker_that_dies() -> None:
    with pytest.raises(DataError, match=r"a process that loads data died .* try num_workers=0"):
        real(loader_of(Failing("dies"), num_workers=1).epoch(0))
    print("an error of data")


@pytest.mark.parametrize(
    "error", [FileNotFoundError(2, "No such file or directory"), ConnectionResetError(), EOFError()]
)
def test_a_worker_that_leaves_by_sys_exit_is_named_without_its_connection(error: Exception) -> None:
    """What torch's queue raises where `sys.exit()` or an interrupt ends a worker."""
    with (
        pytest.raises(DataError, match=r"^A connection ended: a process that loads data died"),
        as_data_errors(1),
    ):
        raise error


# In a process of its own: torch raises in a signal's handler, wherever that finds Python, also in a
# callback of another test's library, which swallows it.
def test_a_worker_that_dies_is_an_error_of_data(tmp_path: Path) -> None:
    code = "from tests.unit.test_loader_mapped import *; load_from_a_worker_that_dies()"
    loading = Running(
        [sys.executable, "-c", code], folder=tmp_path, variables={"PYTHONPATH": str(ROOT)}
    )
    assert loading.wait() == Result(0, "an error of data\n")


def test_a_worker_that_hangs_is_an_error_within_the_limit(tmp_path: Any) -> None:
    class Hanging(Noisy):
        def __getitem__(self, index: int) -> torch.Tensor:
            with open(tmp_path / "fifo"):  # nobody writes
                return super().__getitem__(index)

    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(DataError, match=r"timed out after 1 seconds: .*hangs"):
        real(loader_of(Hanging(), num_workers=1, timeout=1).epoch(0))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SIZE))


class Endless(Dataset[int]):
    """Numbered samples, but no length."""

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("dataset", [Stream(), Endless(), iter([1, 2])])
def test_a_data_set_without_length_or_numbers_is_refused(dataset: Any) -> None:
    with pytest.raises(ConfigError, match=f"{type(dataset).__name__} is not a map-style data set"):
        loader_of(dataset, order=Order(size=SIZE, batch_size=BATCH))


def test_an_order_of_another_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="Noisy has 23 samples, but the order has 22"):
        loader_of(order=Order(size=22, batch_size=5))


def test_a_number_of_workers_below_0_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_workers is -1; it must be at least 0"):
        loader_of(num_workers=-1)


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_at_any_positions_are_those_of_the_epoch(workers: int) -> None:
    whole = torch.cat([batch for _, batch in loader_of().epoch(2)])
    asked = [np.array(positions) for positions in ([22, 0], [7], [3, 4, 5])]
    found = list(loader_of(num_workers=workers).samples(2, asked))
    assert [len(batch) for batch in found] == [2, 1, 3]
    assert torch.equal(torch.cat(found), whole[np.concatenate(asked)])


class Told(Exception):
    """Error that can only be made of a response."""

    def __init__(self, response: Any) -> None:
        super().__init__(f"sample 3 is broken: {response.reason}")


class Unsendable(Noisy):
    """Sample 3 raises an error that can't be pickled or made anew, or can't itself be pickled."""

    def __init__(self, how: str) -> None:
        self._how = how

    def __getitem__(self, index: int) -> Any:
        if index != 3:
            return super().__getitem__(index)
        if self._how == "a local class":

            class Local(Exception):
                pass

            raise Local("sample 3 is broken")
        if self._how == "made of something else":
            raise Told(SimpleNamespace(reason="404"))
        if self._how == "a group":
            raise ExceptionGroup("sample 3 is broken", [ValueError("inside")])
        if self._how == "holds a lock":
            error = ValueError("sample 3 is broken")
            error.lock = threading.Lock()  # type: ignore[attr-defined]
            raise error
        return lambda: None


@pytest.mark.parametrize(
    "how", ["a local class", "made of something else", "a group", "holds a lock"]
)
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_an_error_that_cannot_be_pickled_comes_through_with_its_text(how: str, method: str) -> None:
    loader = loader_of(
        Unsendable(how), num_workers=1, timeout=60, multiprocessing_context=method, collate=list
    )
    with pytest.raises((RuntimeError, ValueError), match="sample 3 is broken"):
        list(loader.epoch(0))


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_batch_that_cannot_be_pickled_is_an_error_that_says_so(method: str) -> None:
    loader = loader_of(
        Unsendable("a sample"),
        num_workers=1,
        timeout=60,
        multiprocessing_context=method,
        collate=list,
    )
    told = r"a batch can't be sent from the process that loads it \((?!.* at 0x).*lambda.*\): let"
    with pytest.raises(DataError, match=told):
        list(loader.epoch(0))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_data_set_of_another_length_is_refused_when_an_epoch_begins(
    workers: int, change: int
) -> None:
    numbers = list(range(SIZE))
    loader = loader_of(numbers, num_workers=workers)
    assert sum(len(batch) for _, batch in loader.epoch(0)) == SIZE
    if change > 0:
        numbers.append(0)
    else:
        numbers.pop()
    told = f"list has {SIZE + change} samples, but had {SIZE} when its loader was made"
    with pytest.raises(ConfigError, match=told):
        next(loader.epoch(1))
    with pytest.raises(ConfigError, match=told):
        next(loader.samples(1, [np.array([0])]))
