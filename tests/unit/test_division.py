"""Divided snapshots: which rank has which part of the state, and what is fetched after a loss."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from paceline.cluster.membership.backup_holder import holder_of
from paceline.cluster.membership.snapshot_name import SnapshotName
from paceline.comm.communicator import Communicator
from paceline.errors import CommError
from paceline.snapshots.division import (
    DividedCopies,
    Division,
    can_divide,
    fetch_divided,
    note_of,
    wants_division,
)
from paceline.snapshots.store import SnapshotStore
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.processes.worlds import world_of

SIZES = (10, 200, 30, 30, 400, 50, 50, 30, 10)
NAME = SnapshotName("test/1", 3)


def parameters() -> list[dict[nn.Parameter, str]]:
    """Return the parameters of two pairs; those of the second have the first one's names."""
    sizes = [SIZES, SIZES[:3]]
    return [
        {nn.Parameter(torch.full((size,), float(n))): f"p{n}" for n, size in enumerate(one)}
        for one in sizes
    ]


@pytest.mark.parametrize("machines", [(3,), (4,), (1, 1, 1), (2, 2), (3, 1, 2)])
def test_each_part_is_on_its_rank_and_on_its_holder(machines: tuple[int, ...]) -> None:
    generation = world_of(machines).generation
    size = sum(machines)
    ranks = [Division.of(generation, rank, parameters()) for rank in range(size)]
    has = {part: {n for n in range(size) if part in ranks[n].held} for part in range(size)}
    assert has == {part: {part, holder_of(generation, part)} for part in range(size)}
    assert all(division.parts == ranks[0].parts for division in ranks)


def test_parts_are_of_about_equal_size() -> None:
    names = {nn.Parameter(torch.zeros(7 + n % 5)): f"p{n}" for n in range(400)}
    division = Division.of(world_of((4,)).generation, 0, [names])
    sizes = Counter[int]()
    for p, name in names.items():
        sizes[division.parts[0][name]] += p.numel()
    whole = sum(sizes.values())
    assert sorted(sizes) == [0, 1, 2, 3]
    assert all(abs(size - whole / 4) < 12 for size in sizes.values())


def test_a_rank_copies_its_parts_and_what_was_added_since() -> None:
    world = world_of((3,))
    names, _ = pairs = parameters()
    division = Division.of(world.generation, 1, pairs)
    store = SnapshotStore()
    copies = DividedCopies(store, division)
    copies.open(NAME)
    values = {name: p.detach() for p, name in names.items()}
    copies.add(NAME, {"parameters": {**values, "new": torch.ones(1)}, "buffers": {"b": 1}})
    copies.hold(NAME)
    state = store.state(NAME)
    held = {name for name, part in division.parts[0].items() if part in (0, 1)}
    assert set(state["parameters"]) == {*held, "new"}
    assert 0 < len(held) < len(names)
    assert state["buffers"] == {"b": 1}


@pytest.mark.parametrize(("lost", "whole"), [(0, True), (2, True), (None, True), (-1, False)])
def test_survivors_fetch_all_parts_or_say_that_one_is_lost(lost: int | None, whole: bool) -> None:
    """Of four ranks one is lost; or 1 and 2, of which 2 is the holder of 1."""
    gone = {1, 2} if lost == -1 else {lost}
    left = [rank for rank in range(4) if rank not in gone]

    def on_rank(c: Communicator) -> None:
        names = parameters()
        store = SnapshotStore()
        copies = DividedCopies(store, Division.of(world_of((4,)).generation, left[c.rank], names))
        copies.open(NAME)
        for suffix, pair in zip(("", " 2"), names, strict=True):
            values = {name: p.detach() for p, name in pair.items()}
            moments = {name: {"m": value + 0.5, "n": 3} for name, value in values.items()}
            copies.add(NAME, {f"parameters{suffix}": values, f"optimizer{suffix}": moments})
        copies.hold(NAME)
        if not whole:
            with pytest.raises(CommError, match="No process has part 1 of the snapshot"):
                fetch_divided(store.state(NAME), c)
            return
        state, fetched = fetch_divided(store.state(NAME), c)
        for suffix, pair in zip(("", " 2"), names, strict=True):
            assert set(state[f"parameters{suffix}"]) == set(pair.values())
            for p, name in pair.items():
                assert torch.equal(state[f"parameters{suffix}"][name], p)
                assert torch.equal(state[f"optimizer{suffix}"][name]["m"], p + 0.5)
                assert state[f"optimizer{suffix}"][name]["n"] == 3
        assert fetched > 2 * 4 * (sum(SIZES) + sum(SIZES[:3]))

    run_ranks(len(left), on_rank)


def test_the_note_says_which_losses_are_survived() -> None:
    assert "loss of any one process the others" in str(note_of(world_of((4,)).generation))
    apart = str(note_of(world_of((2, 2)).generation))
    assert "loss of any one process, or any one machine, the others" in apart


def test_two_ranks_have_nothing_to_divide() -> None:
    assert not can_divide(world_of((2,)).generation)
    assert can_divide(world_of((3,)).generation)


def test_auto_divides_where_whole_copies_take_more_than_a_quarter_of_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("paceline.snapshots.division.machine_memory", lambda: 1600)
    assert not wants_division("auto", weights=50, workers=2)
    assert wants_division("auto", weights=51, workers=2)
    assert not wants_division("whole", weights=51, workers=2)
    assert wants_division("divided", weights=1, workers=1)
