"""A loader of a stream, of one rank: numbers of samples, epochs, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

import paceline
from paceline import ConfigError, World
from tests.harness.library.small_training import loss_of, network, samples, sgd


class Numbers(IterableDataset[Any]):
    """Samples of `samples()`, as many as `count` is at the time."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        data = samples()
        return (data[index] for index in range(self.count))


@pytest.fixture
def world() -> Iterator[World]:
    with paceline.join() as world:
        yield world


def trained(world: World) -> tuple[Any, torch.optim.Optimizer]:
    model = network()
    return paceline.parallelize(model, sgd(model), world)


def test_epochs_of_a_stream_may_differ_in_length(world: World) -> None:
    model, optimizer = trained(world)
    data = Numbers(10)
    loader = paceline.loader(data, 4, world)
    seen = []
    for epoch in range(3):
        assert loader.epoch == epoch
        for x, y in loader:
            with world.step():
                loss_of(model, x, y).backward()
                optimizer.step()
                optimizer.zero_grad()
            seen.append((loader.epoch, loader.step, loader.count, len(x)))
        data.count -= 3
    expected = [(0, 0, 4), (0, 1, 4), (0, 2, 2), (1, 0, 4), (1, 1, 3), (2, 0, 4)]
    assert seen == [(*one, one[2]) for one in expected]
    assert world.steps == 6


def test_an_evaluation_of_a_stream_makes_no_step(world: World) -> None:
    trained(world)
    loader = paceline.loader(Numbers(10), 4, world, train=False, drop_last=True)
    for _ in range(2):
        assert [(loader.step, loader.count) for _ in loader] == [(0, 4), (1, 4)]
    assert world.steps == 0


def test_a_stream_leaves_the_random_numbers_of_a_script_as_they_are(world: World) -> None:
    class Random(Numbers):
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return ((x + torch.randn(6), y) for x, y in super().__iter__())

    loader = paceline.loader(Random(4), 4, world, train=False)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    one, other = next(iter(loader)), next(iter(loader))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(one[0], other[0])


def test_accumulated_batches_of_equal_parts(world: World) -> None:
    model, optimizer = trained(world)
    loader = paceline.loader(Numbers(8), 4, world)
    for x, y in loader:
        if loader.step == 0:
            with world.no_sync():
                loss_of(model, x, y).div(2).backward()
            continue
        with world.step():
            loss_of(model, x, y).div(2).backward()
            optimizer.step()
    assert world.steps == 2


def test_an_error_of_a_stream_that_cannot_be_pickled_comes_with_its_text(world: World) -> None:
    class Broken(Exception):
        pass

    class Breaking(Numbers):
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            yield from super().__iter__()
            raise Broken("the stream broke off")

    trained(world)
    loader = paceline.loader(Breaking(8), 4, world, train=False, num_workers=1)
    with pytest.raises(RuntimeError, match="the stream broke off"):
        list(loader)


def test_an_empty_stream(world: World) -> None:
    trained(world)
    with pytest.raises(ConfigError, match=r"rank 0's stream has no batch in epoch 0.*world\.rank"):
        next(iter(paceline.loader(Numbers(0), 4, world)))


def test_what_a_stream_cannot_have(world: World) -> None:
    with pytest.raises(ConfigError, match="shuffle was given for an IterableDataset"):
        paceline.loader(Numbers(4), 4, world, shuffle=True)  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="batch_size is 0: pass a whole number of samples"):
        paceline.loader(Numbers(4), 0, world)
    with pytest.raises(ConfigError, match="uneven is 'stop'; it must be one of join, shortest"):
        paceline.loader(Numbers(4), 4, world, uneven="stop")
    paceline.loader(Numbers(4), 4, world)
    with pytest.raises(ConfigError, match="already has a training loader"):
        paceline.loader(samples(), 4, world)
