"""Snapshots in memory: open, held, committed, superseded; and entries restored in their tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.api.argument_names import as_arguments
from paceline.cluster.membership.snapshot_name import SnapshotName
from paceline.snapshots.store import SnapshotStore, memory_note
from paceline.update.state_entries import restore_entries


def name(step: int, token: str = "a") -> SnapshotName:
    return SnapshotName(token, step)


def held(snapshots: SnapshotStore, step: int, value: float = 0.0, token: str = "a") -> SnapshotName:
    """Hold a snapshot of one tensor of 400 bytes."""
    own = name(step, token)
    snapshots.open(own)
    snapshots.add(own, {"model": {"weight": torch.full((100,), value)}})
    snapshots.hold(own)
    return own


def weight(snapshots: SnapshotStore, of: SnapshotName) -> Tensor:
    found: Tensor = snapshots.state(of)["model"]["weight"]
    return found


def test_a_snapshot_is_held_when_it_is_closed_and_committed_when_all_hold_it() -> None:
    snapshots = SnapshotStore()
    snapshots.open(name(1))
    assert snapshots.held == ()
    with pytest.raises(KeyError):
        snapshots.state(name(1))
    snapshots.hold(name(1))
    assert (snapshots.held, snapshots.newest_committed) == ((name(1),), None)
    snapshots.commit(name(1))
    assert (snapshots.held, snapshots.newest_committed) == ((name(1),), name(1))


def test_parts_come_one_by_one_and_are_copies() -> None:
    snapshots, source = SnapshotStore(), torch.ones(3)
    snapshots.open(name(1))
    snapshots.add(name(1), {"model": {"a": source}})
    snapshots.add(name(1), {"model": {"b": [source, 2], "c": None}})
    snapshots.add(name(1), {"position": {"step": 1}})
    source.zero_()
    snapshots.hold(name(1))
    state = snapshots.state(name(1))
    assert torch.equal(state["model"]["a"], torch.ones(3))
    assert torch.equal(state["model"]["b"][0], torch.ones(3))
    assert (state["model"]["b"][1], state["model"]["c"]) == (2, None)
    assert state["position"] == {"step": 1}


def test_a_name_is_a_token_and_a_step() -> None:
    snapshots = SnapshotStore()
    old, new = held(snapshots, 1, 1.0), held(snapshots, 1, 2.0, token="b")
    assert snapshots.held == (old, new)
    assert (weight(snapshots, old)[0], weight(snapshots, new)[0]) == (1, 2)


def test_the_newest_committed_stays_while_newer_ones_are_not_committed() -> None:
    snapshots = SnapshotStore()
    first = held(snapshots, 1, 1.0)
    snapshots.commit(first)
    second = held(snapshots, 2, 2.0)
    assert snapshots.held == (first, second)
    assert snapshots.newest_committed == first
    assert snapshots.full
    with pytest.raises(AssertionError, match="none is superseded"):
        snapshots.open(name(3))
    snapshots.commit(second)
    assert snapshots.held == (second,)
    assert not snapshots.full
    assert weight(snapshots, second)[0] == 2


def test_two_that_are_not_committed_stay_until_the_newer_is() -> None:
    snapshots = SnapshotStore()
    first, second = held(snapshots, 1), held(snapshots, 2)
    assert snapshots.full
    snapshots.commit(first)
    assert snapshots.held == (first, second)
    snapshots.commit(second)
    assert snapshots.held == (second,)


def test_a_late_message_about_a_superseded_one_is_ignored() -> None:
    snapshots = SnapshotStore()
    first, second = held(snapshots, 1), held(snapshots, 2)
    snapshots.commit(second)
    snapshots.commit(first)
    assert (snapshots.held, snapshots.newest_committed) == ((second,), second)


def test_an_older_one_is_committed_while_a_newer_one_is_open() -> None:
    snapshots = SnapshotStore()
    superseded = held(snapshots, 1, 1.0)
    older = held(snapshots, 2, 2.0)
    snapshots.commit(older)  # so that the next one uses the memory of the first
    snapshots.open(name(3))
    snapshots.add(name(3), {"model": {"weight": torch.full((100,), 3.0)}})
    for late in (older, superseded):
        snapshots.commit(late)
        assert (snapshots.held, snapshots.newest_committed) == ((older,), older)
    snapshots.hold(name(3))
    assert snapshots.held == (older, name(3))
    assert (weight(snapshots, older)[0], weight(snapshots, name(3))[0]) == (2, 3)
    snapshots.commit(name(3))
    assert snapshots.held == (name(3),)


def test_one_that_is_held_is_committed_while_a_newer_one_is_open() -> None:
    snapshots = SnapshotStore()
    older = held(snapshots, 1, 1.0)
    snapshots.open(name(2))
    assert snapshots.newest_committed is None
    snapshots.commit(older)
    assert snapshots.newest_committed == older
    snapshots.add(name(2), {"model": {"weight": torch.full((100,), 2.0)}})
    snapshots.hold(name(2))
    assert (snapshots.held, snapshots.newest_committed) == ((older, name(2)), older)
    assert (weight(snapshots, older)[0], weight(snapshots, name(2))[0]) == (1, 2)


def test_the_commit_of_an_unknown_name_changes_nothing() -> None:
    snapshots = SnapshotStore()
    own = held(snapshots, 1)
    for unknown in (name(0), name(2), name(1, token="b")):
        snapshots.commit(unknown)
        assert (snapshots.held, snapshots.newest_committed) == ((own,), None)


def test_with_late_commits_some_steps_are_skipped_and_no_memory_is_added() -> None:
    snapshots, taken = SnapshotStore(), []
    for step in range(9):
        if step >= 2 and step - 2 in taken:
            snapshots.commit(name(step - 2))
        if not snapshots.full:
            taken.append(step)
            held(snapshots, step)
        assert snapshots.nbytes <= 800
    assert taken == [0, 1, 3, 5, 7]


def test_one_that_is_open_cannot_be_committed() -> None:
    snapshots = SnapshotStore()
    snapshots.open(name(1))
    with pytest.raises(AssertionError, match="is open"):
        snapshots.commit(name(1))


@pytest.mark.parametrize("by", ["give_up", "open"])
def test_an_open_one_that_is_given_up_leaves_no_trace(by: str) -> None:
    snapshots = SnapshotStore()
    first = held(snapshots, 1, 1.0)
    snapshots.commit(first)
    snapshots.open(name(2))
    snapshots.add(name(2), {"model": {"weight": torch.full((100,), 5.0), "other": torch.ones(1)}})
    if by == "give_up":
        snapshots.give_up(name(2))
        assert (snapshots.held, snapshots.newest_committed) == ((first,), first)
    second = held(snapshots, 3, 3.0)
    assert snapshots.held == (first, second)
    assert snapshots.state(second).keys() == {"model"}
    assert snapshots.state(second)["model"].keys() == {"weight"}
    assert (weight(snapshots, first)[0], weight(snapshots, second)[0]) == (1, 3)


def test_the_memory_of_a_superseded_one_is_used_for_the_next() -> None:
    snapshots, places = SnapshotStore(), []
    for step in range(6):
        own = held(snapshots, step, float(step))
        assert weight(snapshots, own)[0] == step
        places.append(weight(snapshots, own).data_ptr())
        snapshots.commit(own)
        assert snapshots.nbytes == (400 if step == 0 else 800)
    assert len(set(places)) == 2
    assert places[2:] == places[:-2]


def test_memory_that_is_used_again_is_counted_once() -> None:
    snapshots = SnapshotStore()
    for step in range(2):
        snapshots.commit(held(snapshots, step))
    snapshots.open(name(2))
    snapshots.add(name(2), {"model": {"weight": torch.zeros(100)}})
    assert snapshots.nbytes == 800


def test_memory_for_which_there_is_no_use_is_freed() -> None:
    snapshots = SnapshotStore()
    for step in range(2):
        snapshots.commit(held(snapshots, step))
    snapshots.open(name(2))
    snapshots.add(name(2), {"model": {"smaller": torch.zeros(1)}})
    assert snapshots.nbytes == 400 + 400 + 4
    snapshots.hold(name(2))
    assert snapshots.nbytes == 400 + 4


def test_a_generation_drops_what_lies_beyond_its_start() -> None:
    snapshots = SnapshotStore()
    first = held(snapshots, 1, 1.0)
    snapshots.commit(first)
    held(snapshots, 2)
    snapshots.start_from(first)
    assert snapshots.held == (first,)
    again = held(snapshots, 2, 2.0, token="b")
    assert snapshots.held == (first, again)
    assert (weight(snapshots, first)[0], weight(snapshots, again)[0]) == (1, 2)


def test_what_lies_beyond_a_start_is_dropped_be_it_held_or_open() -> None:
    snapshots = SnapshotStore()
    first = held(snapshots, 1, 1.0)
    snapshots.start_from(first)
    assert snapshots.held == (first,)
    snapshots.open(name(2))
    snapshots.add(name(2), {"model": {"weight": torch.zeros(100)}})
    snapshots.start_from(first)
    with pytest.raises(AssertionError, match="there is no snapshot"):
        snapshots.hold(name(2))
    second = held(snapshots, 2, 2.0)
    snapshots.start_from(second)
    assert snapshots.held == (first, second)
    assert (weight(snapshots, first)[0], weight(snapshots, second)[0]) == (1, 2)


def test_what_is_older_than_an_uncommitted_start_stays_until_the_next_commit() -> None:
    snapshots = SnapshotStore()
    first = held(snapshots, 1, 1.0)
    snapshots.commit(first)
    start = held(snapshots, 2, 2.0)
    snapshots.start_from(start)
    assert snapshots.held == (first, start)
    assert snapshots.newest_committed == start
    third = held(snapshots, 3, 3.0, token="b")  # there is room for one more
    assert snapshots.full
    snapshots.start_from(first)  # a second loss
    assert snapshots.held == (first,)
    assert weight(snapshots, first)[0] == 1
    start = held(snapshots, 2, 2.0, token="c")
    snapshots.start_from(start)
    third = held(snapshots, 3, 3.0, token="d")
    snapshots.commit(third)
    assert snapshots.held == (third,)
    held(snapshots, 4, token="d")
    assert snapshots.full
    assert snapshots.nbytes == 2 * 400


def test_the_memory_that_two_need_is_known_from_the_first() -> None:
    snapshots = SnapshotStore()
    assert snapshots.nbytes_required == 0
    snapshots.open(name(0))
    snapshots.add(name(0), {"model": {"weight": torch.zeros(2**18)}})
    assert snapshots.nbytes_required == 0
    snapshots.hold(name(0))
    assert snapshots.nbytes_required == 2 * 2**20
    held(snapshots, 1)
    assert snapshots.nbytes_required == 2 * 400


@pytest.mark.parametrize("limit", [0, 2, 2.5])
def test_snapshots_within_their_limit_stay_on(limit: float) -> None:
    assert memory_note(2 * 2**20, limit) is None


def test_snapshots_beyond_their_limit_are_switched_off_with_both_figures_and_the_flag() -> None:
    note = memory_note(3000 * 2**20 + 1, 3000)
    assert note is not None
    assert "3,000.0 MiB" in note
    assert "--snapshot_memory_mb 3000;" in note
    assert "than snapshot_memory_mb 3000;" in as_arguments(note)


def test_entries_are_restored_in_their_tensors_and_newer_ones_removed() -> None:
    moments, p = torch.ones(3), torch.zeros(3)
    entries: dict[str, Any] = {"moments": moments, "newer": 1, "list": [1], "other": torch.ones(2)}
    saved = {"moments": torch.full((3,), 2.0), "list": [2], "other": torch.ones(3), "step": 4}
    restore_entries(entries, saved, p, {})
    assert entries["moments"] is moments
    assert torch.equal(moments, torch.full((3,), 2.0))
    assert entries.keys() == saved.keys()
    assert (entries["list"], entries["step"]) == ([2], 4)
    for key, own in entries.items():
        assert own is not saved[key] or isinstance(own, int), f"{key} is shared"


@pytest.mark.parametrize("sparse_first", [True, False])
def test_an_entry_that_was_sparse_or_dense_is_so_again(sparse_first: bool) -> None:
    """A momentum has the layout of its first gradient."""
    dense = torch.tensor([[0.0, 0.0], [1.0, 2.0]])
    own, saved = (dense + 1, dense.to_sparse(1))[:: 1 if sparse_first else -1]
    entries = {"momentum_buffer": own}
    restore_entries(entries, {"momentum_buffer": saved}, torch.zeros(2, 2), {})
    restored = entries["momentum_buffer"]
    assert restored.is_sparse == saved.is_sparse
    assert torch.equal(restored.to_dense(), saved.to_dense())
    saved.mul_(2)  # which is not shared
    assert not torch.equal(restored.to_dense(), saved.to_dense())


def test_the_memory_of_a_sparse_entry_counts() -> None:
    momentum = torch.tensor([[0.0, 0.0], [1.0, 2.0]]).to_sparse(1)
    snapshots = SnapshotStore()
    snapshots.open(name := SnapshotName("token", 0))
    snapshots.add(name, {"optimizer": {"momentum": momentum}})
    snapshots.hold(name)
    assert snapshots.nbytes == 8 + 2 * 4  # an index, and a row of two values
    assert snapshots.nbytes_required == 2 * snapshots.nbytes


@pytest.mark.parametrize(
    ("group", "device"), [({}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta")]
)
def test_missing_tensors_are_made_where_torch_makes_them(group: Any, device: str) -> None:
    entries: dict[str, Any] = {}
    saved = {"step": torch.zeros(()), "exp_avg": torch.zeros(2)}
    restore_entries(entries, saved, torch.zeros(2, device="meta"), group)
    assert entries["exp_avg"].device.type == "meta"
    assert entries["step"].device.type == device


def test_what_is_lent_is_the_newest_committed_one_and_stays_as_it_is() -> None:
    snapshots = SnapshotStore()
    first = held(snapshots, 0, 0.0)
    assert snapshots.borrow() is None
    snapshots.commit(first)
    held(snapshots, 1, 1.0)
    borrowed = snapshots.borrow()
    assert borrowed is not None
    assert borrowed.name == first
    places = {borrowed.state["model"]["weight"].data_ptr()}
    for step in range(2, 6):
        snapshots.commit(name(step - 1))
        own = held(snapshots, step, float(step))
        places.add(weight(snapshots, own).data_ptr())
    assert torch.equal(borrowed.state["model"]["weight"], torch.zeros(100))
    assert len(places) == 3
