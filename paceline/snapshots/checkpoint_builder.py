"""Makes checkpoints: of snapshots that all ranks hold, or of a copy that rank 0 takes by itself.

A snapshot's position lacks the sums of steps whose summaries came later; they are added here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import count
from typing import Any

from torch import nn

from paceline.cluster.membership.lineage import as_values
from paceline.cluster.membership.snapshot_name import SnapshotName
from paceline.generation.run import Run
from paceline.reduce.rank_state import OPTIMIZER
from paceline.replica.group import AnyReplica
from paceline.replica.state_parts import ENTRIES, POSITION, parts_of
from paceline.snapshots.checkpoint_entries import (
    checkpoint_entries,
    is_plain,
    snapshot_parameters,
    with_metadata,
)
from paceline.snapshots.copier import StateCopier
from paceline.snapshots.entry_names import entry_names
from paceline.snapshots.objects import StateObjects
from paceline.snapshots.position import Position
from paceline.snapshots.step_snapshots import StepSnapshots
from paceline.snapshots.store import Borrowed, SnapshotStore
from paceline.state.checkpoint_files import exchange_entry
from paceline.state.checkpoint_writer import Checkpoint
from paceline.state.state_copy import copy_state

_TRIES = 10  # each after a newer snapshot was committed


class CheckpointBuilder:
    """Checkpoint builder; only rank 0 uses what it makes.

    Args:
        run: the run, whose present generation's number and lineage checkpoints have.
        replica: this rank's model replica.
        snapshots: this rank's snapshots.

    Attributes:
        sums: sums over all ranks and the epoch's steps up to a step, by that step.
        copied: the newest checkpoint that was copied at once, where no snapshot can be used.
        plain: whether checkpoints can be made of snapshots, when that was last looked at.
    """

    def __init__(self, run: Run, replica: AnyReplica, snapshots: StepSnapshots) -> None:
        self._run = run
        self._replica = replica
        self._snapshots = snapshots
        self._objects = snapshots.objects
        self.sums: dict[int, list[float]] = {}
        self.copied: Checkpoint | None = None
        self.plain = True
        self.is_plain()
        self._numbers = count()  # of copies that no other rank has

    def is_plain(self) -> bool:
        """Return whether state dicts can be made of snapshots; `plain` is that from now on."""
        self.plain = all(is_plain(pair.model, pair.optimizer) for pair in self._objects.pairs)
        return self.plain

    def fits(self, state: Mapping[str, Mapping[Any, Any]]) -> bool:
        """Return whether a snapshot has all entries that the model's state dict has now."""
        pairs = self._objects.pairs
        names = [pair.trained().names for pair in pairs]
        bound = names == self._replica.all_names  # no module was added or replaced since
        return (
            self.is_plain()
            and bound
            and all(
                self._entries(pair, own) == parts_of(state, number)[ENTRIES]
                for number, (pair, own) in enumerate(zip(pairs, names, strict=True))
            )
        )

    def _entries(self, pair: StateObjects, names: Mapping[nn.Parameter, str]) -> dict[str, str]:
        if not pair.scope.first:
            return {}
        if pair.scope.others:
            names = {p: name for name, p in pair.model.named_parameters()}
        return entry_names(pair.model, names)

    def begin_generation(self, number: int) -> None:
        """Discard what was built, and the sums of steps from `number` on, which are repeated."""
        self.sums = {step: sums for step, sums in self.sums.items() if step < number}
        self.copied = None

    def forget_sums(self, *, before: int) -> None:
        """Forget the sums that no snapshot from that before a step on needs."""
        last = max((step for step in self.sums if step < before), default=before)
        self.sums = {step: sums for step, sums in self.sums.items() if step >= last}

    def copy_alone(self, position: Position) -> Borrowed:
        """Copy the settled state before the next step, which no other rank holds.

        Args:
            position: of the run, with all sums.
        """
        own = SnapshotStore()
        name = SnapshotName(f"own/{next(self._numbers)}", position.number)
        copier = StateCopier(
            own, name, self._objects, {**asdict(position), "sent": {}, "members": ()}
        )
        self._replica.copy_now(copier, own=False)
        own.commit(name)
        borrowed = own.borrow()
        assert borrowed is not None
        return borrowed

    def newest(self) -> Checkpoint | None:
        """Return the newest state in memory of which a file can be made; from any thread."""
        if not self.plain or self._replica.stateful:
            return self.copied
        for _ in range(_TRIES):  # another thread may commit a newer one, and forget sums
            borrowed = self._snapshots.borrow()
            if borrowed is None:
                return self.copied
            sent = borrowed.state[POSITION]["sent"]
            sums = self.sums
            if not sent or max(sent) in sums:
                return self._make(borrowed, sums)
        return None

    def make(
        self, borrowed: Borrowed, gathered: Mapping[str, Any] | None = None, *, best: bool = False
    ) -> Checkpoint:
        """Make a checkpoint.

        Args:
            borrowed: the snapshot.
            gathered: what the ranks have besides model and optimizer, before the same step.
            best: it is the best so far.
        """
        return self._make(borrowed, self.sums, gathered, best=best)

    def _make(
        self,
        borrowed: Borrowed,
        sums: Mapping[int, list[float]],
        gathered: Mapping[str, Any] | None = None,
        *,
        best: bool = False,
    ) -> Checkpoint:
        state = borrowed.state
        objects = self._objects
        of_pairs = [gathered or {}]
        if objects.others:
            of_pairs = [(gathered or {}).get(str(pair)) or {} for pair in range(len(objects.pairs))]
        position = dict(state[POSITION])
        del position["members"]
        if sent := position.pop("sent"):  # by this rank alone
            position["sums"] = sums[max(sent)]
        generation = self._run.context.world.generation
        position["generation"] = generation.number
        entries = checkpoint_entries(state, objects, of_pairs)
        for number, (pair, own) in enumerate(zip(objects.pairs, of_pairs, strict=True)):
            model, optimizer = pair.entries
            if not self.plain and pair.scope.first:
                entries[model] = with_metadata(copy_state(pair.model.state_dict()), pair.model)
            if not self.plain and OPTIMIZER not in own:
                entries[optimizer] = copy_state(pair.optimizer.state_dict())
            if exchange := {key: value for key, value in own.items() if key != OPTIMIZER}:
                entries[exchange_entry(number)] = exchange
        return Checkpoint(
            name=borrowed.name,
            step=position["number"],
            state={**entries, "position": position, "lineage": as_values(generation.lineage)},
            parameters=snapshot_parameters(state, objects),
            best=best,
        )
