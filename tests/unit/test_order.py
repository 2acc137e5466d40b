"""The data order: each sample once an epoch, the same batches for any world, never another."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.order import Order, uniforms
from paceline.errors import ConfigError

SEEDS = st.integers(0, 2**40)
SIZES = st.integers(1, 300)
BATCHES = st.integers(1, 97)
WORLDS = st.integers(1, 64)


def test_the_order_is_the_one_that_it_always_was() -> None:
    # A change here changes what every checkpoint means: don't.
    order = Order(size=10, batch_size=3)
    assert order.epoch_indices(0).tolist() == [8, 5, 6, 3, 4, 7, 9, 0, 1, 2]
    assert Order(size=10, batch_size=3, seed=7).epoch_indices(5).tolist() == [
        5,
        6,
        4,
        7,
        1,
        8,
        9,
        0,
        2,
        3,
    ]


def test_the_random_numbers_are_the_ones_that_they_always_were() -> None:
    assert uniforms(0, 0, np.array([0, 1]), 2).tolist() == [
        [0.9185366718819524, 0.09798424529178051],
        [0.12412753810563693, 0.9208592257956708],
    ]


@given(seed=SEEDS, size=SIZES, epoch=st.integers(0, 1000))
def test_an_epoch_visits_every_record_once(seed: int, size: int, epoch: int) -> None:
    indices = Order(size=size, batch_size=8, seed=seed).epoch_indices(epoch)
    assert indices.dtype == np.int64
    assert sorted(indices.tolist()) == list(range(size))


@given(seed=SEEDS, size=SIZES, epoch_size=st.integers(1, 400), epoch=st.integers(0, 50))
def test_a_smaller_epoch_visits_no_record_twice(
    seed: int, size: int, epoch_size: int, epoch: int
) -> None:
    order = Order(size=size, batch_size=8, seed=seed, epoch_size=epoch_size)
    indices = order.epoch_indices(epoch).tolist()
    assert len(indices) == order.samples == min(size, epoch_size)
    assert len(set(indices)) == len(indices)
    assert set(indices) <= set(range(size))


def shares_of(order: Order, step: int, world_size: int) -> list[tuple[int, int]]:
    places = (order.place(0, step, rank, world_size) for rank in range(world_size))
    return [(place.first, place.last) for place in places]


@given(size=SIZES, batch_size=BATCHES, world_size=WORLDS)
def test_shares_joined_in_rank_order_are_the_epoch(
    size: int, batch_size: int, world_size: int
) -> None:
    order = Order(size=size, batch_size=batch_size)
    positions: list[int] = []
    for step in range(order.steps):
        begin = len(positions)
        shares = shares_of(order, step, world_size)
        for first, last in shares:
            positions.extend(range(first, last))
        lengths = [last - first for first, last in shares]
        assert max(lengths) - min(lengths) <= 1
        assert lengths == sorted(lengths, reverse=True)
        assert shares_of(order, step, 1) == [(begin, len(positions))]
        assert len(positions) - begin == batch_size or step == order.steps - 1
    assert positions == list(range(size))


@given(seed=SEEDS, size=SIZES, batch_size=BATCHES, world_size=WORLDS, epoch=st.integers(0, 9))
def test_a_global_batch_holds_the_same_records_for_any_world(
    seed: int, size: int, batch_size: int, world_size: int, epoch: int
) -> None:
    order = Order(size=size, batch_size=batch_size, seed=seed)
    alone = order.epoch_indices(epoch)
    for step in range(order.steps):
        ((first, last),) = shares_of(order, step, 1)
        shares = shares_of(order, step, world_size)
        together = np.concatenate([order.epoch_indices(epoch)[a:b] for a, b in shares])
        assert together.tolist() == alone[first:last].tolist()


def test_epochs_and_seeds_have_different_orders() -> None:
    orders = [
        tuple(Order(size=50, batch_size=8, seed=seed).epoch_indices(epoch).tolist())
        for seed in range(20)
        for epoch in range(20)
    ]
    assert len(set(orders)) == 400


def test_every_record_comes_to_every_position_equally_often() -> None:
    epochs, size = 4000, 8
    order = Order(size=size, batch_size=4)
    counts = np.zeros((size, size))
    for epoch in range(epochs):
        counts[np.arange(size), order.epoch_indices(epoch)] += 1
    expected = epochs / size
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 90  # 49 degrees of freedom: more happens once in 3,000 orders


def test_a_smaller_epoch_is_a_fresh_subset_each_time() -> None:
    order = Order(size=100, batch_size=8, epoch_size=10)
    seen = {index for epoch in range(60) for index in order.epoch_indices(epoch).tolist()}
    assert len(seen) > 95


def test_without_shuffling_records_keep_their_order() -> None:
    order = Order(size=10, batch_size=4, epoch_size=7, shuffle=False)
    assert order.epoch_indices(3).tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_the_short_last_batch_counts_as_a_step() -> None:
    assert Order(size=10, batch_size=4).steps == 3
    assert Order(size=8, batch_size=4).steps == 2
    assert Order(size=10, batch_size=4).place(0, 2, 0, 1).count == 2


def test_an_order_of_imagenets_size_takes_no_noticeable_time() -> None:
    order = Order(size=1_281_167, batch_size=256)
    start = time.thread_time()  # this thread's work, whatever else the machine does
    indices = order.epoch_indices(1)
    assert time.thread_time() - start < 2
    assert np.bincount(indices).max() == 1


@pytest.mark.parametrize("wrong", [{"size": 0}, {"batch_size": 0}, {"epoch_size": 0}])
def test_an_order_of_nothing_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        Order(**({"size": 10, "batch_size": 2} | wrong))


@pytest.mark.parametrize(("step", "rank"), [(3, 0), (-1, 0), (0, 2), (0, -1)])
def test_a_step_or_rank_that_does_not_exist_is_an_error(step: int, rank: int) -> None:
    with pytest.raises(IndexError):
        Order(size=10, batch_size=4).place(0, step, rank, 2)


@given(seed=SEEDS, epoch=st.integers(0, 1000), samples=st.lists(st.integers(0, 2**40), min_size=1))
def test_a_samples_random_numbers_do_not_depend_on_its_neighbours(
    seed: int, epoch: int, samples: list[int]
) -> None:
    together = uniforms(seed, epoch, np.array(samples), 5)
    for sample, row in zip(samples, together.tolist(), strict=True):
        assert uniforms(seed, epoch, np.array([sample]), 5)[0].tolist() == row
        assert uniforms(seed, epoch, np.array([sample]), 3)[0].tolist() == row[:3]


def test_random_numbers_are_uniform_and_unlike_each_other() -> None:
    numbers = uniforms(3, 4, np.arange(20_000), 4)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    for column in numbers.T:
        histogram = np.histogram(column, bins=10, range=(0, 1))[0]
        assert ((histogram - 2000) ** 2 / 2000).sum() < 35  # 9 degrees of freedom
    correlations = np.corrcoef(numbers.T) - np.eye(4)
    assert np.abs(correlations).max() < 0.03
    assert not np.array_equal(numbers, uniforms(3, 5, np.arange(20_000), 4))
    assert not np.array_equal(numbers, uniforms(4, 4, np.arange(20_000), 4))
