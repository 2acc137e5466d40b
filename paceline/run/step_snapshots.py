"""Snapshots of a run at its step boundaries: every rank takes them, and all ranks commit alike.

    step n        boundary: take, if one is due ── end: held ── send summary n, with "held"
    step n + 2    boundary: summary n says that all ranks hold it: commit

All ranks take and commit the same snapshots at the same boundaries, because these follow from
summaries alone. A snapshot is named by its generation, and by the step that follows it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from paceline.replica.replica import Replica
from paceline.replica.state_copier import POSITION, StateCopier, StateObjects, restore_state
from paceline.run.run import Run
from paceline.state.snapshots import SnapshotName, Snapshots


class StepSnapshots:
    """Snapshots of one rank at step boundaries.

    Args:
        run: the run, whose present generation names the snapshots.
        replica: the model's replica, whose steps copy the state.
        objects: the objects whose state is copied.
    """

    def __init__(self, run: Run, replica: Replica, objects: StateObjects) -> None:
        self._run, self._replica, self._objects = run, replica, objects
        self._snapshots = Snapshots()
        self._held_by_all: deque[int] = deque()

    @property
    def held(self) -> tuple[SnapshotName, ...]:
        """Names of the snapshots that this rank holds, oldest first."""
        return self._snapshots.held

    def take(self, step: int, position: Mapping[str, Any]) -> None:
        """Let the step that begins copy the state before it, unless two snapshots are held.

        Before that, commit what all ranks know by now to be held by all; rank 0 may know more.
        """
        while self._held_by_all and self._held_by_all[0] <= step - 2:
            self._snapshots.commit(self._name(self._held_by_all.popleft()))
        if not self._snapshots.full:
            name, recorder = self._name(step), self._run.recorder
            copier = StateCopier(self._snapshots, name, self._objects, position, recorder)
            self._replica.take_snapshot(copier)

    def holds(self, step: int) -> bool:
        """Tell whether this rank holds the snapshot of the state before a step."""
        return self._name(step) in self._snapshots.held

    def note_held_by_all(self, step: int) -> None:
        """Note that all ranks hold the snapshot of the state before a step."""
        self._held_by_all.append(step)

    def restore(self, name: SnapshotName) -> tuple[dict[str, Any], Mapping[Any, Any]]:
        """Restore a snapshot that all ranks of the next generation hold, and drop newer ones.

        Returns:
            the position that `take` was given, and the rank's own state, for
            `Replica.enter_generation`.
        """
        self._held_by_all.clear()
        self._snapshots.drop_beyond(name)
        self._snapshots.commit(name)
        state = self._snapshots.state(name)
        return dict(state[POSITION]), restore_state(state, self._objects)

    def _name(self, step: int) -> SnapshotName:
        return SnapshotName(self._run.context.group.generation.key_prefix, step)
