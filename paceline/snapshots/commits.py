"""Commits of snapshots: each rank acknowledges what it holds; what all acknowledge is committed.

    end of step n    held: the own part leaves to the backup holder
    end of step m    the holder has confirmed it: acknowledged in summary m, and in later ones
    boundary m + 2   summary m says that all ranks acknowledge it: committed

A summary counts the ranks that acknowledge the first and the second snapshot that isn't committed
yet. These are the same ones on all ranks, which take and commit snapshots at the same boundaries.

Where no rank has state of its own, all that a snapshot lacks on a rank are the sums of the last
steps. Once their summaries are received, each rank has the whole snapshot: it is complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from paceline.cluster.membership.backup_holder import holder_of
from paceline.cluster.membership.generation import Generation
from paceline.cluster.membership.snapshot_name import SnapshotName
from paceline.comm.communicator import total
from paceline.generation.run import Run
from paceline.generation.summaries import NONE_ACKNOWLEDGED, StepSummary
from paceline.replica.group import AnyReplica
from paceline.replica.state_parts import DIVISION, POSITION
from paceline.snapshots.backup import SnapshotBackup
from paceline.snapshots.own_part import OwnPart
from paceline.snapshots.store import SnapshotStore


class SnapshotCommits:
    """Commits of one rank's snapshots.

    Args:
        run: the run, whose present ranks acknowledge.
        pairs: the number of pairs of a model and an optimizer.
        backup: sends the own part to the backup holder; None: no rank has copies, and what is held
            is acknowledged.
        replica: the model's replica, which says whether ranks divide state.
    """

    def __init__(
        self,
        run: Run,
        snapshots: SnapshotStore,
        pairs: int,
        backup: SnapshotBackup | None,
        replica: AnyReplica,
    ) -> None:
        self._run = run
        self._snapshots = snapshots
        self._pairs = pairs
        self._backup = backup
        self._replica = replica
        self._totals: dict[SnapshotName, dict[int, Tensor]] = {}  # of steps before the snapshot
        self._reported: dict[int, Sequence[SnapshotName]] = {}  # uncommitted ones, by summary
        self._acknowledged: deque[SnapshotName] = deque()  # by all ranks; to be committed
        self.enter_generation(run.context.world.generation)

    def report(self, step: int) -> Sequence[bool]:
        """Return what this rank reports with a step: which uncommitted snapshots it acknowledges.

        Raises:
            ConfigError: the own part has values of which no copy can be made.
        """
        names = self._reported[step] = self._snapshots.uncommitted
        marks = [self._acknowledges(name) for name in names]
        return [*marks, *NONE_ACKNOWLEDGED[len(marks) :]]

    def receive(self, summary: StepSummary) -> None:
        """Take note of what all ranks acknowledge by a summary; at the same boundary on all."""
        marks = zip(self._reported.pop(summary.step, ()), summary.acknowledged, strict=False)
        uncommitted = self._snapshots.uncommitted
        self._acknowledged.extend(name for name, mark in marks if mark and name in uncommitted)

    def note_sums(self, summary: StepSummary) -> None:
        """Take note of a step's sums over all ranks, as soon as they are received."""
        for name in self._snapshots.held:
            sent = self._sent(name)
            if summary.step in sent:
                sums = sent[summary.step].new_tensor(summary.sums)
                self._totals.setdefault(name, {})[summary.step] = sums
                if self._backup is not None and self._backup.holds(name) and self._complete(name):
                    self._backup.complete(name)

    def totals(self, name: SnapshotName) -> Mapping[int, Tensor]:
        """Return the known sums over all ranks of steps whose own values a snapshot has."""
        return self._totals.get(name, {})

    def commit_next(self) -> SnapshotName | None:
        """Commit the oldest snapshot that all ranks acknowledge; return its name, None without one.

        Raises:
            CommError: this machine has promised to end the generation.
        """
        if not self._acknowledged:
            return None
        name = self._acknowledged.popleft()
        if self._backup is not None:
            held = self._snapshots.held
            self._backup.commit(name, held[held.index(name) :])
        self._snapshots.commit(name)
        self._forget_totals()
        return name

    def wait(self) -> bool:
        """Wait until all ranks acknowledge all snapshots that all hold; collective.

        Returns:
            whether there is one to commit.

        Raises:
            ConfigError: as `report`.
        """
        names = self._snapshots.uncommitted
        context = self._run.context
        if not names:
            return False
        if self._backup is not None:
            context.let_interrupt(self._backup)
            for name in names:
                if not self._acknowledges(name):
                    self._backup.wait(name, context.limits[1])
            if not context.summaries.alone:
                ready = torch.ones(1)
                total(context.group("all", "steps"), ready, "the acknowledgement of a snapshot")
        self._acknowledged.extend(names)
        return True

    def own_part(self, name: SnapshotName) -> OwnPart:
        """Return what this rank alone has of a held snapshot, whose memory it shares."""
        return OwnPart.of(self._snapshots.state(name), self._pairs)

    def members(self, name: SnapshotName) -> Sequence[str]:
        """Return the ids of all members whose parts make up a held snapshot."""
        members: Sequence[str] = self._snapshots.state(name)[POSITION]["members"]
        return members

    def backup_parts(self, name: SnapshotName, lost: Iterable[str]) -> list[OwnPart]:
        """Return the copies held here of what a snapshot has of lost members, given by their ids.

        Raises:
            CommError: a copy can't be read.
        """
        return [] if self._backup is None else self._backup.parts(name, lost)

    def discard(self) -> None:
        """Forget all snapshots, which are dropped, and all copies."""
        self._acknowledged.clear()
        self._totals.clear()
        if self._backup is not None:
            self._backup.discard()

    def leave_generation(self, start: SnapshotName | None) -> None:
        """Forget dropped snapshots, and their copies: those beyond the next generation's start.

        Args:
            start: the start's name; None: it starts from the durable state.
        """
        self._reported.clear()
        self._acknowledged.clear()
        self._forget_totals()
        if self._backup is not None:
            self._backup.leave_generation(self._snapshots.held)
            if start is not None and not self._backup.holds(
                start
            ):  # the step didn't end, or another rank sent it
                self._hold(self._backup, start, None)

    def enter_generation(self, generation: Generation) -> None:
        """Accept copies of a generation's snapshots, before its ranks connect."""
        if self._backup is not None:
            self._backup.begin_generation(generation.key_prefix)

    def _acknowledges(self, name: SnapshotName) -> bool:
        """Return whether this rank acknowledges a held snapshot, whose part leaves if it is new."""
        if self._backup is None:
            return True
        if not self._backup.holds(name):
            group = self._run.context.world
            holder = holder_of(group.generation, group.rank)
            self._hold(self._backup, name, holder)
        return self._backup.acknowledges(name)

    def _hold(self, backup: SnapshotBackup, name: SnapshotName, holder: int | None) -> None:
        group = self._run.context.world
        backup.hold(
            name,
            self.own_part(name),
            owner=group.member.id,
            holder=None if holder is None else group.generation.members[holder].id,
            whole=self.members(name),
            completed=self._snapshots.state(name)[POSITION]["number"],
            complete=self._complete(name),
        )

    def _sent(self, name: SnapshotName) -> Mapping[int, Tensor]:
        """Return this rank's values of the steps before a held snapshot that weren't summed."""
        sent: Mapping[int, Tensor] = self._snapshots.state(name)[POSITION]["sent"]
        return sent

    def _complete(self, name: SnapshotName) -> bool:
        """Return whether this rank needs no other one's part of a held snapshot."""
        parted = self._replica.stateful or DIVISION in self._snapshots.state(name)
        return not parted and self._sent(name).keys() <= self.totals(name).keys()

    def _forget_totals(self) -> None:
        held = self._snapshots.held
        self._totals = {name: sums for name, sums in self._totals.items() if name in held}
