"""Ranges of a parameter's state are joined; what is missing, or differs, is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import RankStateError
from paceline.reduce.rank_state import Ranges, agreed, join_ranges

TEMPLATE = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
NUMEL = TEMPLATE.numel()
MEMORY = torch.arange(NUMEL) + 0.5  # the values, in the order in which they lie in memory


def part(start: int, stop: int, step: float = 7.0, values: Tensor = MEMORY) -> Ranges:
    """Return a rank's part of a parameter, as Adam has it."""
    entries = {"exp_avg": values[start:stop].clone(), "step": torch.tensor(step), "foreach": None}
    return {"w": (start, stop, entries)}


@given(cuts=st.sets(st.integers(1, NUMEL - 1), max_size=6), order=st.randoms(), again=st.booleans())
def test_ranges_are_joined_in_any_order_and_may_be_there_twice(
    cuts: set[int], order: st.DataObject, again: bool
) -> None:
    ends = [0, *sorted(cuts), NUMEL]
    parts = [part(a, b) for a, b in pairwise(ends)]
    parts += parts[:1] * again
    order.shuffle(parts)  # type: ignore[attr-defined]
    joined = join_ranges("w", TEMPLATE, [{"other": (0, 1, {})}, *parts])
    assert joined["exp_avg"].stride() == TEMPLATE.stride()
    assert torch.equal(joined["exp_avg"], MEMORY.as_strided(TEMPLATE.shape, TEMPLATE.stride()))
    assert (joined["step"], joined["foreach"], len(joined)) == (7.0, None, 3)
    joined["exp_avg"].zero_()
    assert all(bool(own["w"][2]["exp_avg"].all()) for own in parts)


@pytest.mark.parametrize(
    ("ranges", "missing"),
    [
        ([(9, NUMEL)], (0, 9)),
        ([(0, 9), (11, NUMEL)], (9, 11)),
        ([(0, 50), (3, 20), (51, NUMEL)], (50, 51)),
        ([(0, 9)], (9, NUMEL)),
        ([], (0, NUMEL)),
    ],
    ids=str,
)
@pytest.mark.parametrize("stateless", [False, True])
def test_values_that_no_part_has_are_named(
    ranges: list[tuple[int, int]], missing: tuple[int, int], stateless: bool
) -> None:
    parts = [{"w": (a, b, {})} if stateless else part(a, b) for a, b in ranges]
    with pytest.raises(RankStateError, match="no part has them") as caught:
        join_ranges("w", TEMPLATE, parts)
    assert (caught.value.parameter, caught.value.start, caught.value.stop) == ("w", *missing)


OTHER = MEMORY.index_fill(0, torch.tensor(15), -1.0)


@pytest.mark.parametrize(
    "second",
    [
        part(20, NUMEL, step=8.0),
        part(10, NUMEL, values=OTHER),
        part(15, 16, values=OTHER),
        {"w": (20, NUMEL, {})},
        {"w": (20, NUMEL, {"exp_avg": MEMORY[20:], "step": torch.tensor(7.0)})},
    ],
    ids=["another step", "an overlap", "a range within", "no state", "fewer entries"],
)
def test_parts_that_differ_are_refused(second: Ranges) -> None:
    with pytest.raises(RankStateError, match="the parts differ") as caught:
        join_ranges("w", TEMPLATE, [second, part(0, 20), part(20, NUMEL)])
    assert caught.value.parameter == "w"


def test_parameters_without_state_or_without_values_have_none() -> None:
    assert join_ranges("w", TEMPLATE, [{"w": (0, 20, {})}, {"w": (20, NUMEL, {})}]) == {}
    assert join_ranges("w", torch.empty(0, 3), [{}, {}]) == {}
    one = {"w": (0, 1, {"exp_avg": torch.ones(1)})}
    assert join_ranges("w", torch.tensor(0.0), [one])["exp_avg"].shape == ()


def test_parts_of_different_snapshots_or_of_none_are_refused() -> None:
    assert agreed([3, 3]) == 3
    for values, reason in (([3, 4], "different snapshots or worlds"), ([], "no rank's part")):
        with pytest.raises(RankStateError, match=reason) as caught:
            agreed(values)
        assert not caught.value.parameter
