"""Layers that need two samples of a rank: how batches are divided for them, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import paceline
from paceline.comm.communicator import Communicator
from paceline.data.order import Order
from paceline.errors import ConfigError
from paceline.run.small_slices import SmallSlices
from paceline.snapshots.position import Position
from paceline.update.batch_norm import BatchShare, convert_sync_batchnorm
from tests.harness.equivalence.one_rank import Bench
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.steps_by_hand import replica_step
from tests.harness.library.small_training import sgd
from tests.harness.processes.worlds import run_of

REMEDIES = "pass drop_last=True", "sync_bn=True"


def after_linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def of_pooled_images() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (3, 4, 1)), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(3), nn.Flatten()
    )


def of_sequences() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (3, 4)), nn.BatchNorm1d(3), nn.Flatten())


class OfTokens(nn.Module):
    """Normalises all tokens of a batch as rows of one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x.reshape(-1, 3))
        return y


def frozen() -> nn.Module:
    model = after_linear()
    model[2].eval()  # type: ignore[index]
    return model


def least_of(make_model: Callable[[], nn.Module], order: Order, ranks: int) -> list[int]:
    """Return on each rank the smallest slice after a first step."""

    def run(c: Communicator) -> int:
        model, position = make_model(), Position()
        small = SmallSlices(run_of(c), position, REMEDIES)
        with small.in_step([model], order, 4):
            model(torch.randn(4, 12))
        return small.min_slice

    return run_ranks(ranks, run)


@pytest.mark.parametrize(
    ("make_model", "least"),
    [(after_linear, 2), (of_pooled_images, 2), (of_sequences, 1), (OfTokens, 1), (frozen, 1)],
)
def test_a_layer_with_one_value_a_sample_is_found(
    make_model: Callable[[], nn.Module], least: int
) -> None:
    assert least_of(make_model, Order(size=19, batch_size=8), 2) == [least] * 2
    assert least_of(make_model, Order(size=20, batch_size=8), 2) == [1] * 2  # two each


def test_a_last_batch_of_one_sample_is_refused_in_the_first_step() -> None:
    for ranks in (1, 2):
        with pytest.raises(ConfigError, match=r"one sample.*BatchNorm 2 gets.*pass drop_last=True"):
            least_of(after_linear, Order(size=17, batch_size=8), ranks)
    assert least_of(of_sequences, Order(size=17, batch_size=8), 1) == [1]


def test_a_last_batch_of_one_sample_is_refused_with_sync_bn_too() -> None:
    model = convert_sync_batchnorm(after_linear(), run_of(), BatchShare())
    with pytest.raises(ConfigError, match="BatchNorm 2 gets one value per channel"):
        least_of(lambda: model, Order(size=17, batch_size=8), 1)


def test_a_layer_that_one_rank_alone_has_used_decides_for_all() -> None:
    def run(c: Communicator) -> int:
        model = after_linear()
        small = SmallSlices(run_of(c), Position(), REMEDIES)
        with small.in_step([model], Order(size=19, batch_size=8), 4):
            if c.rank == 1:
                model(torch.randn(4, 12))
        return small.min_slice

    assert run_ranks(2, run) == [2, 2]


def test_one_sample_of_a_rank_is_a_sentence() -> None:
    model = after_linear()
    small = SmallSlices(run_of(), Position(), REMEDIES)
    with (
        pytest.raises(ConfigError, match=r"one sample of the batch: pass drop_last=True, or sync"),
        small.in_step([model], None, 1),
    ):
        model(torch.randn(1, 12))


@settings(max_examples=40)
@given(
    size=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    ranks=st.integers(1, 6),
    shares=st.none() | st.lists(st.integers(1, 9), min_size=6, max_size=6),
)
def test_no_rank_gets_one_sample_of_two_or_more(
    size: int, batch_size: int, ranks: int, shares: list[int] | None
) -> None:
    order = Order(size=size, batch_size=batch_size)
    own = None if shares is None else shares[:ranks]
    for step in range(order.steps):
        for rank in range(ranks):
            place = order.place(0, step, rank, ranks, own, 2)
            counts = [end - begin for begin, end in pairwise(place.cuts)]
            whole = min(batch_size, size - step * batch_size)
            assert sum(counts) == whole
            assert 1 not in counts or whole == 1
            computed = range(whole)[slice(*(at - place.cuts[0] for at in _ends(place.computed)))]
            assert len(computed) == (place.count or min(2, whole))


def _ends(positions: slice) -> tuple[int, int]:
    return positions.start, positions.stop


def test_borrowed_samples_count_nothing() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    x = torch.randn(5, 3, 12, dtype=torch.float64)

    def train(c: Communicator) -> dict[str, Tensor]:
        bench = Bench.of(c, copy.deepcopy(model))
        for number, batch in enumerate(x):
            place = Order(size=3, batch_size=3).place(0, 0, c.rank, c.world_size, None, 2)
            with replica_step(bench.replica, number, place.weight):
                bench.model(batch[place.computed]).square().mean().backward()
                bench.optimizer.step()
                bench.optimizer.zero_grad()
        bench.replica.settle()
        return {name: value.clone() for name, value in bench.model.state_dict().items()}

    (alone,) = run_ranks(1, train)
    for ranks in (2, 3):
        for state in run_ranks(ranks, train):
            for name, value in state.items():
                torch.testing.assert_close(value, alone[name], rtol=0, atol=1e-10)


def test_a_scripts_loop_is_refused_in_its_first_step() -> None:
    model = nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4))
    data = [torch.randn(12) for _ in range(9)]
    trained: list[int] = []

    def train(world: paceline.World) -> None:
        _, optimizer = paceline.parallelize(model, sgd(model), world)
        loader = paceline.loader(data, 4, world)
        for x in loader:
            with world.step():
                model(x).sum().backward()
                optimizer.step()
            trained.append(loader.step)

    with paceline.join() as world:
        message = r"drop_last=True or another batch_size to paceline"
        with pytest.raises(ConfigError, match=message):
            train(world)
    assert trained == []
