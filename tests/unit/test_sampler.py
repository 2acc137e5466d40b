"""A loader with a sampler, of one rank: what it draws, what it keeps, and what it refuses."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import paceline
from paceline import ConfigError, World
from tests.harness.library.sampled_runs import SIZE, WEIGHTS, Numbered
from tests.harness.library.small_training import loss_of, network, samples, sgd


@pytest.fixture
def world() -> Iterator[World]:
    with paceline.join(seed=5) as world:
        model = network()
        paceline.parallelize(model, sgd(model), world)
        yield world


def epoch(world: World, loader: Any) -> list[int]:
    """Train an epoch by steps without an update; return its samples."""
    seen = []
    for _, _, numbers in loader:
        with world.step():
            pass
        seen += numbers.tolist()
    return seen


def test_an_epoch_has_what_a_sampler_draws(world: World) -> None:
    sampler = SubsetRandomSampler(range(10, 30))
    loader = paceline.loader(Numbered(), 8, world, sampler=sampler)
    assert (len(loader), loader.samples) == (3, 20)
    first, second = epoch(world, loader), epoch(world, loader)
    assert first != second
    assert sorted(first) == sorted(second) == [*range(10, 30)]


def test_weights_choose_samples(world: World) -> None:
    weights = np.zeros(SIZE)
    weights[[3, 7]] = [1, 3]
    loader = paceline.loader(Numbered(), 10, world, weights=weights)
    found = Counter(chosen for _ in range(20) for chosen in epoch(world, loader))
    assert set(found) == {3, 7}
    assert sum(found.values()) == 20 * SIZE
    assert found[7] / found[3] == pytest.approx(3, rel=0.3)


def test_drop_last_and_epochs_of_a_sampler_that_draws_more_than_there_is(world: World) -> None:
    sampler = WeightedRandomSampler(WEIGHTS, 70)
    loader = paceline.loader(Numbered(), 16, world, sampler=sampler, drop_last=True)
    assert (len(loader), loader.samples) == (4, 64)
    assert len(epoch(world, loader)) == 64


def test_an_evaluation_by_a_sampler(world: World) -> None:
    loader = paceline.loader(Numbered(), 8, world, train=False, sampler=[5, 4, 5])
    for _ in range(2):
        assert [n for _, _, numbers in loader for n in numbers.tolist()] == [5, 4, 5]


def test_one_sample_at_two_positions_has_two_transforms(world: World) -> None:
    loader = paceline.loader(Numbered(), 4, world, train=False, sampler=[5, 5])
    ((x, _, _),) = loader
    assert not torch.equal(x[0], x[1])


@pytest.mark.parametrize(
    "draws", [{}, {"generator": torch.Generator().manual_seed(1)}], ids=["torch's", "its own"]
)
def test_the_scripts_random_stream_and_the_order_know_nothing_of_each_other(
    world: World, draws: dict[str, Any]
) -> None:
    loader = paceline.loader(Numbered(), 8, world, sampler=RandomSampler(range(SIZE), **draws))
    orders = []
    for seed in (1, 1):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        batches = loader._order.draws._order_of(1 + len(orders))
        assert torch.equal(torch.get_rng_state(), before)
        orders.append(batches.tolist())
    assert orders[0] != orders[1]


def test_generators_of_two_seeds_draw_two_orders(world: World) -> None:
    orders = []
    for seed in (1, 2, 1):
        sampler = RandomSampler(range(SIZE), generator=torch.Generator().manual_seed(seed))
        loader = paceline.loader(Numbered(), SIZE, world, train=False, sampler=sampler)
        orders.append([n for _, _, numbers in loader for n in numbers.tolist()])
    assert orders[0] == orders[2] != orders[1]


class Epochs(Sampler[int]):
    """Draws by the epoch that `set_epoch` gives, as DistributedSampler's kin do."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter([self.epochs[-1]] * 4)


def test_a_sampler_is_told_the_epoch(world: World) -> None:
    sampler = Epochs()
    loader = paceline.loader(Numbered(), 4, world, sampler=sampler)
    assert [epoch(world, loader) for _ in range(3)] == [[0] * 4, [1] * 4, [2] * 4]
    assert sampler.epochs == [0, 1, 2]  # once an epoch


class Shrinking(Sampler[int]):
    def __init__(self) -> None:
        self.left = 12

    def __iter__(self) -> Iterator[int]:
        self.left -= 2
        return iter(range(self.left))


def test_another_number_of_samples_in_a_later_epoch(world: World) -> None:
    loader = paceline.loader(Numbered(), 4, world, sampler=Shrinking())
    epoch(world, loader)
    with pytest.raises(ConfigError, match=r"Shrinking\) drew 8 samples in epoch 1, but 10 in epo"):
        epoch(world, loader)


class Own(Sampler[Any]):
    """Yields what it is given."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.cycle([0, 1])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


BATCHES = BatchSampler(SequentialSampler(range(SIZE)), 4, drop_last=False)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"sampler": BATCHES}, r"sampler is BatchSampler, which draws batches: .*batch_size="),
        ({"sampler": Own([[0, 1], [2, 3]])}, r"sampler is Own, which draws batches"),
        ({"sampler": Own([torch.arange(3)])}, r"sampler is Own, which draws batches"),
        ({"batch_sampler": BATCHES}, r"batch_sampler was given, but paceline\.loader makes"),
        (
            {"sampler": DistributedSampler(range(SIZE), 2, 0)},
            r"DistributedSampler, which divides the samples among 2 ranks itself",
        ),
        ({"sampler": iter([1, 2])}, r"list_iterator, which can't be iterated anew in each epoch"),
        ({"sampler": 5}, r"sampler is int, which can't be iterated anew"),
        ({"sampler": Endless()}, r"draws more than 3,200 samples.*an endless sampler"),
        ({"sampler": []}, r"draws no sample"),
        (
            {"sampler": [0, SIZE]},
            r"draws 50: it must draw sample indices, whole numbers from 0 to 49",
        ),
        ({"sampler": [-1]}, r"draws -1: it must"),
        ({"sampler": ["a"]}, r"draws 'a': it must"),
        ({"sampler": [0], "shuffle": True}, r"sampler and shuffle were given"),
        ({"weights": WEIGHTS, "shuffle": False}, r"weights and shuffle were given"),
        ({"sampler": [0], "weights": WEIGHTS}, r"sampler and weights were given.*pass one"),
        ({"weights": WEIGHTS[1:]}, r"weights has shape \(49,\), but the data set has 50 samples"),
        ({"weights": -WEIGHTS}, r"weights\[1\] is -\S+: pass finite numbers, at least 0"),
        ({"weights": 0 * WEIGHTS}, r"weights is 0 everywhere: "),
        ({"weights": "heavy"}, r"weights is str: pass a number for each sample"),
    ],
)
def test_what_is_refused(world: World, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        paceline.loader(Numbered(), 4, world, **given)


@pytest.mark.parametrize("given", [{"sampler": [0]}, {"weights": [1.0]}], ids=str)
def test_a_stream_takes_none(world: World, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="was given for an IterableDataset"):
        paceline.loader(Stream(), 4, world, **given)


@pytest.mark.parametrize("first", [{}, {"weights": WEIGHTS}], ids=["without", "with"])
def test_a_run_keeps_its_kind_of_order(tmp_path: Any, first: dict[str, Any]) -> None:
    def train(given: dict[str, Any]) -> None:
        with paceline.join(tmp_path / "run") as world:
            model = network()
            optimizer = sgd(model)
            paceline.parallelize(model, optimizer, world)
            for x, y in paceline.loader(samples(SIZE), 10, world, **given):
                with world.step():
                    loss_of(model, x, y).backward()
                    optimizer.step()
                    optimizer.zero_grad()

    train(first)
    with pytest.raises(ConfigError, match=r"sampler= or weights=, and that of the checkpoint did"):
        train({} if first else {"weights": WEIGHTS})
