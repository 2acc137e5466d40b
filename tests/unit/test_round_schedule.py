"""The round schedule of averaging, and the division of a model into fragments."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.update.outer.fragments import cut_into_fragments
from paceline.update.outer.round_schedule import RoundSchedule


def picture(schedule: RoundSchedule, steps: int) -> list[str]:
    """Draw what is taken after each step, and what is applied before the next; "." is nothing."""

    def row(fragments: list[tuple[int, ...]]) -> str:
        return " ".join("".join(map(str, of_step)) or "." for of_step in fragments)

    return [
        row([schedule.taken_after(step) for step in range(steps)]),
        row([schedule.applied_before(step + 1) for step in range(steps)]),
    ]


@pytest.mark.parametrize(
    ("schedule", "rows"),
    [
        (RoundSchedule(3), [". . 0 . . 0 . . 0", ". . 0 . . 0 . . 0"]),
        (RoundSchedule(1), ["0 0 0 0 0 0 0 0 0", "0 0 0 0 0 0 0 0 0"]),
        (RoundSchedule(6, 2), [". . 0 . . 1 . . 0", ". . 0 . . 1 . . 0"]),
        (RoundSchedule(6, 2, 1), [". . 0 . . 1 . . 0", ". . . 0 . . 1 . ."]),
        (RoundSchedule(4, 3), [". 0 1 2 . 0 1 2 .", ". 0 1 2 . 0 1 2 ."]),
        (RoundSchedule(2, 3), ["0 12 0 12 0 12 0 12 0", "0 12 0 12 0 12 0 12 0"]),
        (RoundSchedule(3, 1, 2), [". . 0 . . 0 . . 0", ". . . . 0 . . 0 ."]),
        # The last round is short, and ends with everything merged.
        (RoundSchedule(4, steps=9), [". . . 0 . . . 0 0", ". . . 0 . . . 0 0"]),
        (RoundSchedule(6, 2, 2, steps=9), [". . 0 . . 1 . . 01", ". . . . 0 . . 1 01"]),
        (RoundSchedule(6, 2, 4, steps=9), [". . 0 . . 1 . . 01", ". . . . . . 0 1 01"]),
        # Post-local SGD; the delay of the first phase, of rounds of one step, is 0.
        (RoundSchedule("1@0,3@4", 1, 2), ["0 0 0 0 . . 0 . .", "0 0 0 0 . . . . 0"]),
        # The first phase ends in mid-round.
        (RoundSchedule([(0, 4), (6, 2)]), [". . . 0 . 0 . 0 .", ". . . 0 . 0 . 0 ."]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "schedule",
)
def test_fragments_are_taken_and_applied_like_this(
    schedule: RoundSchedule, rows: list[str]
) -> None:
    assert picture(schedule, 9) == rows


def test_a_phase_that_begins_behind_the_runs_end_has_no_effect() -> None:
    assert picture(RoundSchedule("2@0,3@4", steps=4), 4) == [". 0 . 0", ". 0 . 0"]
    assert picture(RoundSchedule("2@0,3@4", steps=3), 3) == [". 0 0", ". 0 0"]


phases = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=3).map(
    lambda pairs: tuple((sum(n for n, _ in pairs[:i]), h) for i, (_, h) in enumerate(pairs))
)


@settings(max_examples=300)
@given(
    every=phases,
    fragments=st.integers(1, 6),
    delay=st.integers(0, 8),
    steps=st.none() | st.integers(1, 40),
)
def test_in_any_schedule_each_fragment_travels_once_a_round_and_one_merge_at_a_time(
    every: tuple[tuple[int, int], ...], fragments: int, delay: int, steps: int | None
) -> None:
    schedule = RoundSchedule(every, fragments, delay, steps)
    all_fragments = set(range(fragments))
    under_way: dict[int, int] = {}  # fragment: the step after which it was taken
    taken_last = dict.fromkeys(all_fragments, -1)
    length = steps or 45
    for step in range(length):
        h = [h for first, h in every if first <= step][-1]
        for p in schedule.taken_after(step):
            assert p not in under_way
            assert step - taken_last[p] <= max(h for _, h in every)
            under_way[p] = taken_last[p] = step
        for p in schedule.applied_before(step + 1):
            assert step - under_way.pop(p) <= min(delay, h - 1)
        if any(first == step + 1 for first, _ in every) or step + 1 == steps:
            assert set(schedule.taken_after(step)) == all_fragments
            assert not under_way


@given(
    h=st.integers(1, 30), fragments=st.integers(1, 12), delay=st.integers(0, 29), t=st.integers(0)
)
def test_inside_a_phase_a_merge_is_applied_exactly_its_delay_later(
    h: int, fragments: int, delay: int, t: int
) -> None:
    delay = min(delay, h - 1)
    schedule = RoundSchedule(h, fragments, delay)
    start = t % 1000
    steps = range(start, start + h)
    taken = [p for step in steps for p in schedule.taken_after(step)]
    assert sorted(taken) == list(range(fragments))
    for step in range(start + h, start + 2 * h):
        assert schedule.applied_before(step + 1 + delay) == schedule.taken_after(step)


def test_taken_fragments_are_spread_evenly_over_a_round() -> None:
    schedule = RoundSchedule(50, 8)
    steps = [step for step in range(100) if schedule.taken_after(step)]
    gaps = {later - step for step, later in pairwise(steps)}
    assert gaps == {6, 7}


sizes = st.lists(st.integers(1, 60), min_size=1, max_size=9)


@given(sizes=sizes, data=st.data())
def test_the_largest_fragment_is_as_small_as_contiguous_fragments_can_be(
    sizes: list[int], data: st.DataObject
) -> None:
    fragments = data.draw(st.integers(1, len(sizes)))
    parts = cut_into_fragments(sizes, fragments)
    assert len(parts) == fragments
    assert all(parts)  # none is empty
    assert [index for part in parts for index in part] == list(range(len(sizes)))
    best = min(
        max(sum(sizes[a:b]) for a, b in zip((0, *cuts), (*cuts, len(sizes)), strict=True))
        for cuts in combinations(range(1, len(sizes)), fragments - 1)
    )
    assert max(sum(sizes[i] for i in part) for part in parts) == best


@pytest.mark.parametrize("fragments", [0, 4])
def test_more_fragments_than_buckets_are_refused(fragments: int) -> None:
    with pytest.raises(ConfigError) as caught:
        cut_into_fragments([5, 5, 5], fragments)
    assert str(caught.value) == (
        f"--fragments {fragments}: must be from 1 to 3, the number of the model's buckets; use "
        "fewer fragments, or smaller buckets by --bucket_mb."
    )
