"""Several ranks train as one process on the whole batch does, to 1e-10 in float64: the grid.

Cases (`tests/harness/equivalence/equivalence_cases.py`) by numbers of ranks by bucket sizes by
synchronizers. All of them have uneven shares, an empty share, and a short last batch. Trained is a
selection in which any two values of different axes meet.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import nn

from paceline.algorithms.allreduce import make_allreduce
from tests.harness.equivalence.contributed import contributed
from tests.harness.equivalence.equivalence_cases import CASES
from tests.harness.equivalence.large_batch import State, Training, convnet, largest_difference
from tests.harness.equivalence.put_synchronizers import notified
from tests.harness.twins.communicator import ThreadGroup

Kind = Callable[..., Any]


SYNCHRONIZERS: dict[str, Callable[[], Kind]] = {  # each makes one for a run
    "allreduce": lambda: make_allreduce,
    "notified": lambda: notified(False),
    "CONTRIBUTING's": lambda: contributed()["AtEnd"],
}
GRID = ("allreduce", "notified")
WORLD_SIZES = (1, 2, 3, 4)
BUCKET_BYTES = {"a parameter each": 1, "about 2 kB": 2_000, "whole model": 10**9}


@cache
def alone(case: str) -> State:
    return CASES[case]().alone()


def chosen() -> Iterator[tuple[str, str, int, str]]:
    """Yield a synchronizer, a case, a world size, and a bucket size: each case four times.

    Six cases that follow each other meet each world size with each synchronizer and bucket size.
    """
    sizes = tuple(BUCKET_BYTES)
    for number, case in enumerate(CASES):
        for world_size in WORLD_SIZES:
            turn = number + world_size
            yield GRID[turn % len(GRID)], case, world_size, sizes[turn % len(sizes)]


def test_any_two_values_of_different_axes_meet() -> None:
    axes = (GRID, tuple(CASES), WORLD_SIZES, tuple(BUCKET_BYTES))
    for one, other in combinations(range(len(axes)), 2):
        met = {(each[one], each[other]) for each in chosen()}
        assert met == set(product(axes[one], axes[other]))


@pytest.mark.parametrize(("name", "case", "world_size", "bucket_size"), [*chosen()])
def test_ranks_train_as_one_process_does(
    name: str, case: str, world_size: int, bucket_size: str
) -> None:
    bucket_bytes = BUCKET_BYTES[bucket_size]
    states = CASES[case]().on_threads(world_size, bucket_bytes, SYNCHRONIZERS[name]())
    for state in states:
        assert largest_difference(state, alone(case)) < 1e-10
        assert largest_difference(state, states[0]) == 0


@pytest.mark.parametrize("name", [name for name in SYNCHRONIZERS if name not in GRID])
@pytest.mark.parametrize("case", CASES)
def test_the_other_synchronizers_train_as_one_process_does(case: str, name: str) -> None:
    for state in CASES[case]().on_threads(4, 2_000, SYNCHRONIZERS[name]()):
        assert largest_difference(state, alone(case)) < 1e-10


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(1)
    return convnet()


@pytest.fixture(params=SYNCHRONIZERS.values(), ids=SYNCHRONIZERS.keys())
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param()  # type: ignore[no-any-return]


def test_operators_are_made_before_ranks_that_are_threads_use_them() -> None:
    ThreadGroup(2)
    assert "default" in vars(torch.ops.aten.batch_norm_update_stats)


def test_more_ranks_than_samples_train_as_one_process_does(model: nn.Module, kind: Kind) -> None:
    training = Training.of(model)  # the last batch has 5 samples
    states = training.on_threads(7, 2_000, kind)
    for state in states:
        assert largest_difference(state, training.alone()) < 1e-10


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
        lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-2),
        lambda m: torch.optim.Adafactor(m.parameters(), lr=1e-2),  # not element-wise
    ],
    ids=["AdamW", "Adagrad", "Adafactor"],
)
def test_any_optimizer_trains_as_alone(model: nn.Module, make_optimizer: Any, kind: Kind) -> None:
    training = Training.of(model, make_optimizer)
    for state in training.on_threads(3, 2_000, kind):
        assert largest_difference(state, training.alone()) < 1e-10


def test_channels_last_weights_train_as_contiguous_ones_do(model: nn.Module, kind: Kind) -> None:
    training = Training.of(model)
    last = training.with_model(copy.deepcopy(model).to(memory_format=torch.channels_last))
    for state in last.on_threads(2, 2_000, kind):
        assert largest_difference(state, training.alone()) < 1e-10


@pytest.mark.parametrize("case", ["usual", "sync_bn", "clipped by norm", "a group added later"])
@pytest.mark.parametrize("name", GRID)
def test_two_runs_give_the_same_bits(name: str, case: str) -> None:
    one, other = (CASES[case]().on_threads(3, 2_000, SYNCHRONIZERS[name]()) for _ in range(2))
    assert largest_difference(one[2], other[2]) == 0
