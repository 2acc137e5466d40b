"""Training of a session: models with their optimizers, and what is saved with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

from paceline.replica.group import AnyReplica, ReplicaGroup
from paceline.replica.replica import Replica
from paceline.snapshots.objects import StateObjects
from paceline.snapshots.restore import restore_checkpoint
from paceline.state.stateful import Restorable, Stateful
from paceline.wiring.pairs import Pair


class Beginning(Protocol):
    """Protocol of what makes the state that a run begins with."""

    def entries(self) -> Mapping[str, Any]:
        """Make the entries that a checkpoint of the run's beginning would have."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Training:
    """Training: pairs of a model and an optimizer, with their replicas and the state of both.

    Attributes:
        pairs: each model with one of its optimizers.
        replicas: the replica of each pair.
        tracked: further objects (schedulers, loss scalers, …), by name.
        tracked_entry: the entry of a checkpoint file for them; "": each has an entry of its own.
        saved: objects whose state only checkpoint files need, by name.
        within_epoch: whether the run goes back within an epoch alone. A script's loop does: it
            counts its epochs, and doesn't repeat what it does between two of them.
        beginning: makes the run's beginning again; None, on all ranks: it can't be had any more.
    """

    pairs: Sequence[Pair]
    replicas: Sequence[Replica]
    tracked: Mapping[str, Restorable]
    tracked_entry: str = ""
    saved: Mapping[str, Stateful] = field(default_factory=dict)
    within_epoch: bool = False
    beginning: Beginning | None = None

    @cached_property
    def replica(self) -> AnyReplica:
        """The replica, or all of them as one."""
        return ReplicaGroup(self.replicas) if len(self.replicas) > 1 else self.replicas[0]

    @cached_property
    def objects(self) -> StateObjects:
        """What snapshots and checkpoints have, all pairs together."""
        first, *others = self.pairs
        return replace(
            _state_of(first),
            tracked=self.tracked,
            saved=self.saved,
            tracked_entry=self.tracked_entry,
            others=[_state_of(pair) for pair in others],
        )

    def restore(self, entries: Mapping[str, Any]) -> None:
        """Restore a checkpoint's entries in mid-run; no replica is bound.

        Raises:
            KeyError, RuntimeError, TypeError, ValueError: they are of another model or optimizer.
        """
        restore_checkpoint(entries, self.objects)


def _state_of(pair: Pair) -> StateObjects:
    return StateObjects(
        model=pair.model,
        optimizer=pair.optimizer,
        scope=pair.scope,
        entries=pair.entries,
        local_buffers=pair.buffers == "local",
    )
