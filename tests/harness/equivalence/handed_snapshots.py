"""Hands a snapshot over to a member that lacks it, before it enters a generation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from paceline.cluster.membership.snapshot_name import SnapshotName
from paceline.replica.state_parts import POSITION, RANK
from paceline.snapshots.step_snapshots import StepSnapshots

State = Mapping[str, Mapping[Any, Any]]


def state_of_all(source: StepSnapshots, name: SnapshotName) -> State:
    """Return the state of a held snapshot, without what the source alone has of it."""
    state = source._snapshots.state(name)
    sent = {step: torch.zeros_like(sums) for step, sums in state[POSITION]["sent"].items()}
    return {**state, POSITION: {**state[POSITION], "sent": sent}, RANK: {}}


def hold(target: StepSnapshots, name: SnapshotName, state: State) -> None:
    """Hold a copy of such a state as a snapshot."""
    target._snapshots.open(name)
    target._snapshots.add(name, state)
    target._snapshots.hold(name)
