"""The interval between in-memory snapshots: the smallest that costs under 1% of the time."""

from __future__ import annotations

import pytest

from paceline.snapshots.step_snapshots import MAX_STEPS, interval_of, step_is_due


def measured(*steps: tuple[float, float]) -> int:
    """Choose by steps of so many seconds, each with its copies', after two that allocate."""
    return interval_of([(90.0, 50.0), (90.0, 50.0), *steps])


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
    assert measured(*[(step + copies, copies)] * 5) == steps


def test_exactly_that_is_too_much() -> None:
    assert measured(*[(500 + 4.5, 4.5)] * 5) == 2  # binary fractions but for 0.009


def test_medians_of_five_decide_and_nothing_earlier() -> None:
    times = [(1.0, 0.015)] * 3 + [(9.0, 0.8)] * 2  # two of which something disturbed
    assert measured(*times[1:]) == 0
    assert measured(*times) == 2


def test_snapshots_that_allocate_memory_dont_count() -> None:
    steps = [(9.0, 0.0)] * 3  # without one, before memory is allocated
    steps += [(1.0, 0.9)] * 2 + [(1.0, 0.001)] * 5
    assert [interval_of(steps[:count]) for count in range(10)] == [0] * 10
    assert interval_of(steps) == 1


def test_steps_without_a_snapshot_tell_how_long_a_step_is() -> None:
    assert measured(*[(4.0, 0.015)] * 5) == 1
    assert measured(*[(4.0, 0.015)] * 5, *[(1.0, 0.0)] * 6) == 2


def test_each_step_is_due_until_there_is_an_interval() -> None:
    assert all(step_is_due(number, 0) for number in range(7))
    assert [number for number in range(7) if step_is_due(number, 3)] == [0, 3, 6]
