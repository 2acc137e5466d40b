"""Shares of a global batch: exact counts of any batch, and those that balance measured times."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config.world import SyncConfig
from paceline.data.order import Order
from paceline.data.shares import balanced, divide

SHARES = st.lists(st.integers(0, 100), min_size=1, max_size=6).filter(any)


@given(count=st.integers(0, 500), shares=SHARES)
def test_a_batch_is_divided_in_proportion_and_without_a_rest(count: int, shares: list[int]) -> None:
    counts = divide(count, shares)
    assert sum(counts) == count
    for own, share in zip(counts, shares, strict=True):
        assert abs(own - Fraction(count * share, sum(shares))) < 1
        assert share or not own


@given(shares=SHARES)
def test_a_full_batch_is_divided_into_the_shares_themselves(shares: list[int]) -> None:
    assert divide(sum(shares), shares) == tuple(shares)


@pytest.mark.parametrize(
    ("count", "shares", "expected"),
    [
        (10, (48, 16), (8, 2)),  # 7.5 and 2.5: the first rank's is rounded up
        (3, (1, 1), (2, 1)),
        (1, (1, 3), (0, 1)),
        (7, (0, 5, 0), (0, 7, 0)),
        (0, (1, 2), (0, 0)),
    ],
)
def test_what_is_left_goes_to_the_largest_remainders(
    count: int, shares: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert divide(count, shares) == expected


@given(
    size=st.integers(1, 200),
    batch=st.integers(1, 60),
    shares=SHARES,
)
def test_slices_of_any_shares_joined_in_rank_order_are_the_epoch(
    size: int, batch: int, shares: list[int]
) -> None:
    order, ranks = Order(size=size, batch_size=batch), range(len(shares))
    positions: list[int] = []
    for step in range(order.steps):
        begin = len(positions)
        places = [order.place(0, step, rank, len(shares), shares) for rank in ranks]
        assert len({place.cuts for place in places}) == 1
        for place in places:
            positions.extend(range(place.first, place.last))
            own = range(*place.computed.indices(size))
            assert len(own) == max(1, place.count)
            assert set(own) <= set(range(begin, min(begin + batch, size)))
        assert sum(place.weight for place in places) == pytest.approx(1)
    assert positions == list(range(size))


@given(
    count=st.integers(20, 500),
    seconds=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=6),
    least=st.integers(0, 3),
)
def test_balanced_shares_sum_to_the_batch_and_none_is_below_the_least(
    count: int, seconds: list[float], least: int
) -> None:
    shares = balanced(count, seconds, least)
    assert sum(shares) == count
    assert min(shares) >= least


def test_balanced_shares_take_equally_long() -> None:
    assert balanced(64, (1.0, 3.0)) == (48, 16)
    assert balanced(60, (0.2, 0.1, 0.1)) == (12, 24, 24)
    assert balanced(64, (1.0, 1000.0), least=2) == (62, 2)


@pytest.mark.parametrize(
    ("options", "measured"),
    [
        ({"sync": "server", "staleness": "async"}, True),
        ({"sync": "server", "staleness": "async", "shares": "equal"}, False),
        ({"sync": "server", "staleness": "2"}, False),
        ({"sync": "server", "staleness": "2", "shares": "measured"}, True),
        ({"sync": "notified"}, False),
        ({}, False),
    ],
)
def test_shares_are_measured_where_they_are_asked_for_or_workers_are_asynchronous(
    options: dict[str, Any], measured: bool
) -> None:
    assert SyncConfig(**options).measures_shares is measured
