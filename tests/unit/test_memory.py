"""Copies of state: independent, with the strides of the original, in memory that is used again."""

from __future__ import annotations

import pytest
import torch

from paceline.state.state_copy import copy_state, finite


def test_a_copy_does_not_change_with_the_original() -> None:
    weight = torch.ones(2, requires_grad=True)
    state = {"a": [weight, 1], "b": ({"c": weight}, "text", None)}
    copy = copy_state(state)
    with torch.no_grad():
        weight.zero_()
    assert torch.equal(copy["a"][0], torch.ones(2))
    assert torch.equal(copy["b"][0]["c"], torch.ones(2))
    assert copy["b"][1:] == ("text", None)
    assert not copy["a"][0].requires_grad


def test_values_that_can_be_changed_are_copied() -> None:
    state = {"list": [1], "dict": {"a": 1}, "set": {1}, "inner": [[torch.ones(1), {1}]], "plain": 2}
    copy = copy_state(state)
    state["list"].append(2)  # type: ignore[attr-defined]
    state["dict"]["a"] = 2  # type: ignore[index]
    state["set"].add(2)  # type: ignore[attr-defined]
    state["inner"][0][1].add(2)  # type: ignore[index]
    assert (copy["list"], copy["dict"], copy["set"]) == ([1], {"a": 1}, {1})
    assert (copy["inner"][0][1], copy["plain"]) == ({1}, 2)


def test_strides_survive() -> None:
    images = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert copy_state(images).stride() == images.stride()
    assert copy_state(torch.zeros(())).shape == ()


def test_memory_is_used_again_where_it_fits() -> None:
    first = copy_state({"a": torch.zeros(3), "b": torch.zeros(3)})
    second = copy_state({"a": torch.ones(3), "b": torch.ones(4)}, first)
    assert second["a"].data_ptr() == first["a"].data_ptr()
    assert torch.equal(second["a"], torch.ones(3))
    assert torch.equal(second["b"], torch.ones(4))


def test_lists_of_another_length_use_the_memory_of_what_they_share() -> None:
    first = copy_state([torch.zeros(3), torch.zeros(2)])
    second = copy_state([torch.ones(3), torch.ones(2), torch.ones(2)], first)
    assert [t.data_ptr() for t in second[:2]] == [t.data_ptr() for t in first]
    assert [t.sum() for t in second] == [3, 2, 2]
    assert len(copy_state(second[:1], second)) == 1


def test_memory_of_another_dtype_isnt_used_again() -> None:
    first = copy_state(torch.zeros(3))
    assert copy_state(torch.ones(3, dtype=torch.float64), first).dtype == torch.float64


def test_memory_of_other_strides_isnt_used_again() -> None:
    first = copy_state(torch.zeros(2, 3, 4, 4))
    images = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    copy = copy_state(images, first)
    assert copy.stride() == images.stride()
    assert torch.equal(copy, images)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_no_number_is_seen(broken: float) -> None:
    good = {"a": [torch.full((4,), 1e38), torch.tensor(3)], "b": 1.0}
    assert finite(good)
    good["a"][0][2] = broken  # type: ignore[index]
    assert not finite(good)
