"""How many samples a collated batch has, by its form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate

import paceline
from paceline import ConfigError, World
from paceline.data.batch_count import samples_in
from tests.harness.library.small_training import loss_of, network, sgd

T = torch.zeros


class Own:
    """A batch class of one's own, as torch's documentation shows."""

    def __init__(self, n: int) -> None:
        self.inp, self.tgt = T(n, 3), T(n)


@pytest.mark.parametrize(
    ("make", "left"),
    [
        (lambda n: T(n, 3), 13),
        (lambda n: (T(n, 8), T(n, 1)), 13),
        (lambda n: (T(n, 16), T(n, 1)), 13),  # as wide as the batch is long
        (lambda n: {"ids": T(n, 7), "mask": T(n, 7), "names": ["a"] * n}, 13),
        (lambda n: [np.zeros((n, 2)), np.zeros(n)], 13),
        (lambda n: ((T(n, 2), T(n, 4)), T(n)), 13),  # two inputs
        (lambda n: (tuple(T(3, 5, 5) for _ in range(n)), tuple({} for _ in range(n))), 13),
        (lambda n: (T(n, 3, 5, 5), [{"boxes": T(i, 4)} for i in range(n)]), 13),
        (lambda n: [T(i + 1) for i in range(n)], 13),  # samples of several lengths
        (lambda n: [T(224) for _ in range(n)], 13),
        (Own, 13),
        (lambda n: (T(7, n), T(n)), 16),  # time first
        (lambda n: (T(n, 2), T(9, 4)), 16),  # one part is no part of the samples
        (lambda n: (T(100), T(n + 1)), 16),  # offsets
        (lambda n: (T(2 * n, 3), T(2 * n)), 16),  # doubled: all are there
        (lambda n: "a text", 16),
        (lambda n: 5, 16),
    ],
)
def test_the_form_tells(make: Any, left: int) -> None:
    assert samples_in(make(16), 16) == 16
    assert samples_in(make(13), 16) == left


def test_a_batch_of_none_has_no_samples() -> None:
    assert samples_in(None, 4) == 0
    assert samples_in([], 4) == 0
    assert samples_in(([], []), 4) == 0


class Files(Dataset[Any]):
    """Samples, some of which can't be read."""

    def __init__(self, bad: tuple[int, ...] = (3,)) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, int] | None:
        return None if index in self.bad else (torch.ones(6).double(), 1)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        files = Files()
        return (files[index] for index in range(8))


def readable(samples: list[Any]) -> Any:
    """Leave out what can't be read, and return None where nothing is left."""
    left = [sample for sample in samples if sample is not None]
    return default_collate(left) if left else None


def flagged(samples: list[Any]) -> Any:
    """Mark what can't be read, and leave it out by the mark."""
    marked = [{"ok": s is not None, "x": T(6).double() if s is None else s[0]} for s in samples]
    return {"x": torch.stack([one["x"] for one in marked if one["ok"]])}


@pytest.fixture
def world() -> Iterator[World]:
    with paceline.join() as world:
        yield world


def step(world: World, **given: Any) -> None:
    with world.step(**given):
        pass


def loop(world: World, loader: Any) -> None:
    for _ in loader:
        step(world)


@pytest.mark.parametrize("data", [Files(), Stream()], ids=["map-style", "stream"])
@pytest.mark.parametrize("collate", [readable, flagged])
def test_collation_that_leaves_samples_out_is_refused(
    world: World, data: Any, collate: Any
) -> None:
    model = network()
    paceline.parallelize(model, sgd(model), world)
    loader = paceline.loader(data, 8, world, collate_fn=collate)
    with pytest.raises(
        ConfigError, match=r"^collate_fn was given 8 samples .*, but its batch has 7: .*samples=len"
    ):
        loop(world, loader)


@pytest.mark.parametrize("given", [{"samples": 7}, {"weight": 7.0}])
def test_a_script_that_counts_is_free_to(world: World, given: dict[str, Any]) -> None:
    model, lines = network(), []
    optimizer = sgd(model)
    paceline.parallelize(model, optimizer, world)
    for x, y in paceline.loader(Files(), 8, world, collate_fn=readable):
        with world.step(**given):
            batch_slice = world._position.waiting[0]
            loss_of(model, x, y).backward()
            optimizer.step()
        lines.append(batch_slice.skipped)
    assert lines == [1]


def test_a_batch_of_which_nothing_is_left(world: World) -> None:
    model = network()
    paceline.parallelize(model, sgd(model), world)
    loader = paceline.loader(Files(bad=tuple(range(8))), 8, world, collate_fn=readable)
    with pytest.raises(ConfigError, match=r"given 8 samples .*, but its batch has 0: "):
        loop(world, loader)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"samples": 2.5}, r"samples is 2\.5; it must be a whole number.*weight="),
        ({"samples": -1}, r"samples is -1"),
        ({"weight": -0.5}, r"weight is -0\.5; it must be a finite number, at least 0"),
        ({"weight": float("nan")}, r"weight is nan"),
        ({"weight": torch.ones(2)}, r"weight is tensor"),
        ({"weight": 0}, r"weight is 0 on all ranks: a mean over nothing"),
    ],
)
def test_numbers_that_a_step_refuses(world: World, given: dict[str, Any], sentence: str) -> None:
    model = network()
    paceline.parallelize(model, sgd(model), world)
    with pytest.raises(ConfigError, match=sentence):
        step(world, **given)
