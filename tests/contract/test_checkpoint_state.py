"""A checkpoint file made of a snapshot has what the settled state dicts have, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.cluster.membership.snapshot_name import SnapshotName
from paceline.snapshots.checkpoint_entries import checkpoint_entries, is_plain
from paceline.snapshots.objects import StateObjects
from tests.contract.test_snapshots import CASES, REPLICATED_ONLY, STEP
from tests.harness.equivalence.case_models import normalised
from tests.harness.equivalence.snapshot_ranks import TOKEN, Case, Rank, first_difference


class Shared(nn.Module):
    """One module under two names, its buffer too, and one that isn't in the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(192, 192), nn.BatchNorm1d(192))
        self.second = self.first
        self.head = nn.Linear(192, 10)
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self.register_buffer("nothing", None)
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        y: Tensor = self.head(self.second(self.first(x.flatten(1))))
        return y


class Counting(nn.Linear):
    """A layer with further state."""

    def __init__(self) -> None:
        super().__init__(192, 10)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x.flatten(1))

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def named(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer whose groups have the parameters' names."""
    return torch.optim.AdamW(model.named_parameters(), lr=0.01)


MORE = {
    "a module with two names": Case(make_model=Shared),
    "a module with further state": Case(make_model=Counting),
    "batch norm": Case(make_model=normalised),
    "named parameters": Case(make_model=normalised, make_optimizer=named),
}


def dicts(objects: StateObjects) -> dict[str, Any]:
    """Return the present state dicts as plain dicts."""
    parts = {"model": objects.model, "optimizer": objects.optimizer, **objects.tracked}
    states = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
    return {name: state if name == "model" else dict(state) for name, state in states.items()}


@pytest.mark.parametrize("case", [*CASES, *REPLICATED_ONLY, *MORE])
def test_a_file_of_a_snapshot_has_the_state_dicts_before_its_step(case: str) -> None:
    of = {**CASES, **REPLICATED_ONLY, **MORE}[case]

    def settled(rank: Rank) -> dict[str, Any]:
        for number in range(STEP):
            rank.train(number)
        rank.replica.settle()
        return dicts(rank.objects)

    def of_a_snapshot(rank: Rank) -> dict[str, Any]:
        for number in range(STEP):
            rank.train(number)
        name = rank.take(STEP)
        for number in range(STEP, STEP + 3):
            rank.train(number)
        assert is_plain(rank.model, rank.optimizer)
        return checkpoint_entries(rank.snapshots.state(name), rank.objects)

    for expected, entries in zip(of.on_ranks(settled), of.on_ranks(of_a_snapshot), strict=True):
        assert first_difference(expected, entries) == ""
        for name in ("model", "optimizer"):
            assert list(entries[name]) == list(expected[name])
        assert entries["model"]._metadata == expected["model"]._metadata


def test_a_buffer_that_was_added_later_is_in_the_file() -> None:
    def work(rank: Rank) -> list[str]:
        rank.train(0)
        rank.take(1)
        rank.train(1)
        rank.model.register_buffer("late", torch.ones(1))
        name = rank.take(2)
        rank.train(2)
        return list(checkpoint_entries(rank.snapshots.state(name), rank.objects)["model"])

    for entries in Case(make_model=normalised).on_ranks(work):
        assert "late" in entries


def test_tracked_objects_have_an_entry_of_their_own_or_a_common_one() -> None:
    def work(rank: Rank) -> dict[str, Any]:
        rank.objects = replace(rank.objects, tracked_entry="tracked", saved={"a": rank.average})
        rank.take(0)
        rank.train(0)
        state = rank.snapshots.state(SnapshotName(TOKEN, 0))
        return checkpoint_entries(state, rank.objects)

    for entries in Case(make_model=normalised).on_ranks(work):
        assert sorted(entries) == ["a", "model", "optimizer", "tracked"]
        assert sorted(entries["tracked"]) == ["average", "schedule"]
        assert entries["a"]["count"] == 0


class Renamed(nn.Linear):
    """A layer that saves something else."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "w"] = self.weight.detach()


def hooked(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.register_state_dict_pre_hook(lambda *_: None)


def hooked_after(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[0].register_state_dict_post_hook(lambda *_: None)  # type: ignore[index]


def hooked_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.register_state_dict_post_hook(lambda *_: None)


def replaced(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.state_dict = dict  # type: ignore[method-assign, assignment]


def with_a_renamed_layer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.append(Renamed(1, 1))  # type: ignore[operator]


@pytest.mark.parametrize(
    "change", [hooked, hooked_after, hooked_optimizer, replaced, with_a_renamed_layer]
)
def test_a_state_dict_that_is_made_in_another_way_is_not_plain(change: Callable[..., None]) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert is_plain(model, optimizer)
    change(model, optimizer)
    assert not is_plain(model, optimizer)
