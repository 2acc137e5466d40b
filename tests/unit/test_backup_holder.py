"""Backup holders are on other machines where there are any, and evenly loaded."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster.membership.backup_holder import holder_of
from tests.harness.membership.missing_parts import missing_parts
from tests.harness.processes.worlds import world_of


def holders(*workers: int) -> list[int | None]:
    """Return each rank's backup holder."""
    generation = world_of(workers).generation
    return [holder_of(generation, rank) for rank in range(sum(workers))]


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ((1,), [None]),
        ((3,), [1, 2, 0]),
        ((1, 1), [1, 0]),
        ((2, 1), [2, 2, 0]),
        ((1, 2), [1, 0, 0]),
        ((2, 2, 2), [2, 3, 4, 5, 0, 1]),
        ((3, 2), [3, 4, 3, 0, 1]),
        ((1, 3, 1), [1, 0, 4, 0, 2]),
    ],
)
def test_holders_of_small_worlds(workers: tuple[int, ...], expected: list[int | None]) -> None:
    assert holders(*workers) == expected


@given(workers=st.lists(st.integers(1, 9), min_size=2, max_size=7))
def test_a_holder_is_on_another_machine_and_no_rank_has_more_than_it_must(
    workers: list[int],
) -> None:
    generation, found = world_of(workers).generation, holders(*workers)
    for rank, holder in enumerate(found):
        assert holder is not None
        assert generation.machine_of(holder) != generation.machine_of(rank)
    largest, others = max(workers), sum(workers) - max(workers)
    assert max(Counter(found).values()) == max(1, -(-largest // others))


def test_a_part_is_missing_once_its_owner_and_its_holder_are_lost() -> None:
    held = {0: {"a", "c"}, 1: {"b", "a"}, 2: {"c", "b"}}  # a's holder is 1, b's 2, c's 0
    members = ("a", "b", "c")
    assert missing_parts(members, held.values()) == ()
    assert missing_parts(members, [held[0], held[2]]) == ()
    assert missing_parts(members, [held[0]]) == ("b",)
