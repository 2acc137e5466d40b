"""Decides on the next generation of a script's run by the store, instead of votes.

Each generation's token follows from the one before, so a member that isn't in a generation can wait
for the next one. Under a generation's keys:

    held/M        names of the snapshots that member M holds
    part/M        what member M, which leaves, alone has of the start snapshot
    snapshot      the start snapshot, if members come back
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from paceline.api.world import World
from paceline.cluster.membership.generation import Generation, Group
from paceline.cluster.membership.protocol import Successor
from paceline.cluster.membership.snapshot_name import SnapshotName
from paceline.errors import CommError
from paceline.replica.live_hooks import patch
from paceline.replica.state_parts import POSITION
from paceline.snapshots.own_part import OwnPart
from paceline.snapshots.step_snapshots import StepSnapshots
from tests.harness.equivalence.handed_snapshots import hold, state_of_all
from tests.harness.membership.given_membership import GivenMembership


class Successors:
    """The generations of a run on one machine, as one of its members sees them.

    Args:
        world: the member's world, in its first generation.
        parked: returns the members that aren't in a generation, by its number; never member 0.

    Attributes:
        generation: number of the present generation, from 0.
        starts: the steps from which the later generations continued.
    """

    def __init__(
        self, world: World, parked: Callable[[int], Collection[int]] = lambda number: ()
    ) -> None:
        self._world, self._parked = world, parked
        membership = GivenMembership(world._run.store, next_generation=self.decide)
        membership.activities = world._run.membership.activities
        world._run.membership, world._session.backup = membership, None  # no vote, and no backups
        self._parts: list[OwnPart] = []  # of members that leave
        self._first = self._present = world._run.context.world.generation
        self._member, self.generation = world.rank, 0
        self.starts: list[int] = []

    def decide(self, error: CommError) -> Successor:
        """Return the next generation that this member is in."""
        before = self._members
        successor = self._next(before=before, held=self._snapshots.held)
        while successor is None:
            before = self._members
            successor = self._next(before=before, held=())
        return successor

    @property
    def _members(self) -> list[int]:
        """The members of the present generation, in rank order."""
        absent = self._parked(self.generation)
        return [number for number in range(self._first.world_size) if number not in absent]

    def _next(self, *, before: list[int], held: Sequence[SnapshotName]) -> Successor | None:
        """Agree with all members on a generation; return it if this member is in it."""
        prefix, member = f"{self._present.key_prefix}/next", self._member
        if member in before:
            mine = [(*name, self._completed(name)) for name in held]
            self._put(f"{prefix}/held/{member}", json.dumps(mine))
        texts = [self._get(f"{prefix}/held/{each}") for each in before]
        of_all = set.intersection(*({tuple(n) for n in json.loads(t)} for t in texts))
        *name, completed = max(of_all, key=lambda each: each[1])
        start = SnapshotName(*name)
        self.generation += 1
        self.starts.append(start.step)
        self._present = self._following(completed)
        after, self._parts[:] = self._members, []
        if set(after) - set(before) and member == 0:
            self._put(f"{prefix}/snapshot", packed(state_of_all(self._snapshots, start)))
        if member not in after:
            if member in before:
                self._put(f"{prefix}/part/{member}", packed(self._snapshots.restore(start)[1]))
            return None
        if member not in before and start not in self._snapshots.held:
            hold(self._snapshots, start, unpacked(self._get(f"{prefix}/snapshot")))
        if member == 0:
            left = sorted(set(before) - set(after))
            self._parts[:] = [unpacked(self._get(f"{prefix}/part/{each}")) for each in left]
        group = Group.world(self._present, after.index(member))
        patch(self._snapshots.commits, "backup_parts", lambda *_: self._parts)
        return Successor(group=group, start=start)

    def _following(self, start: int) -> Generation:
        members = [self._first.members[number] for number in self._members]
        return replace(
            self._present,
            token=hashlib.sha256(self._present.token.encode()).hexdigest(),
            number=self._present.number + 1,
            members=tuple(replace(m, local_rank=rank) for rank, m in enumerate(members)),
            ancestors=self._present.lineage,
            start=start,
        )

    def _completed(self, name: SnapshotName) -> int:
        """Return the number of completed steps in a snapshot; a step may train several batches."""
        number: int = self._snapshots._snapshots.state(name)[POSITION]["number"]
        return number

    @property
    def _snapshots(self) -> StepSnapshots:
        assert self._world._loop.steps is not None
        return self._world._loop.steps._snapshots

    def _put(self, key: str, text: str) -> None:
        self._world._process.joined.store.set(key, text)

    def _get(self, key: str) -> str:
        return self._world._process.joined.store.get(key).decode()


def packed(value: object) -> str:
    """Return a tree of tensors as a text."""
    data = io.BytesIO()
    torch.save(value, data)
    return base64.b64encode(data.getvalue()).decode()


def unpacked(text: str) -> Any:
    """Return the tree of such a text."""
    return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=False)
