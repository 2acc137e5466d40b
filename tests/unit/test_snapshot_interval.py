"""The interval between in-memory snapshots: the smallest that costs under 1% of the time."""

from __future__ import annotations

import pytest

from paceline.snapshots.interval import MAX_STEPS, SnapshotInterval


def measured(*snapshots: tuple[float, float]) -> SnapshotInterval:
    """Measure steps of so many seconds, each with its snapshot's, after two that allocate."""
    interval = SnapshotInterval()
    for step, copies in [(90.0, 50.0), (90.0, 50.0), *snapshots]:
        interval.measure(step, copies)
    return interval


@pytest.mark.parametrize(
    ("step", "copies", "steps"),
    [
        (1.0, 0.001, 1),
        (1.0, 0.0089, 1),
        (1.0, 0.0091, 2),
        (1.0, 0.0179, 2),
        (1.0, 0.0181, 3),
        (0.5, 0.0089, 2),
        (0.25, 0.5, 223),
        (0.001, 8.0, MAX_STEPS),
        (0.0, 1.0, MAX_STEPS),
    ],
)
def test_the_interval_is_the_smallest_that_costs_under_nine_thousandths(
    step: float, copies: float, steps: int
) -> None:
    assert measured(*[(step + copies, copies)] * 5).choice() == steps


def test_exactly_that_is_too_much() -> None:
    assert measured(*[(500 + 4.5, 4.5)] * 5).choice() == 2  # binary fractions but for 0.009


def test_medians_of_five_decide_and_nothing_earlier() -> None:
    times = [(1.0, 0.015)] * 3 + [(9.0, 0.8)] * 2  # two of which something disturbed
    assert measured(*times[1:]).choice() == 0
    assert measured(*times).choice() == 2


def test_snapshots_that_allocate_memory_dont_count() -> None:
    interval = SnapshotInterval()
    for _ in range(3):
        interval.measure(9.0)  # a step without one, before memory is allocated
    for number in range(6):
        interval.measure(1.0, 0.9 if number < 2 else 0.001)
        assert interval.choice() == 0
    interval.measure(1.0, 0.001)
    assert interval.choice() == 1


def test_steps_without_a_snapshot_tell_how_long_a_step_is() -> None:
    interval = measured(*[(4.0, 0.015)] * 5)
    assert interval.choice() == 1
    for _ in range(6):
        interval.measure(1.0)
    assert interval.choice() == 2


def test_each_step_is_due_until_there_is_an_interval() -> None:
    interval = SnapshotInterval()
    assert all(map(interval.step_is_due, range(7)))
    interval.steps = 3
    assert [number for number in range(7) if interval.step_is_due(number)] == [0, 3, 6]
    assert [number for number in range(5) if SnapshotInterval(4).step_is_due(number)] == [0, 4]


def test_an_interval_may_be_measured_anew() -> None:
    interval = measured(*[(1.0, 0.015)] * 5)
    assert interval.choice() == 2
    interval.restart()
    for number in range(7):
        assert interval.choice() == 0
        interval.measure(1.0, 0.9 if number < 2 else 0.025)
    assert interval.choice() == 3


def test_a_known_interval_is_not_measured() -> None:
    interval = SnapshotInterval(4)
    for _ in range(9):
        interval.measure(1.0, 0.5)
    assert interval.choice() == 0
