"""Snapshots of a run at its step boundaries: every rank takes them, and all ranks commit alike.

    step n        boundary: take, if one is due ── end: held, the own part leaves to the holder
    step m ≥ n    end: the holder has confirmed it: acknowledge, in summary m
    step m + 2    boundary: summary m says that all ranks acknowledge it: commit

All ranks take and commit the same snapshots at the same boundaries, because these follow from
summaries alone; so does the interval between snapshots, which rank 0 measures. A snapshot is named
by its generation, and by the step that follows it.

Where weights are averaged, snapshots are taken where rounds end (`average_parts`).

A snapshot is taken in every S-th step. S is chosen by measurement (`interval_of`):

    S = the smallest integer with  cost / (S · step) < 0.9%,  at most `MAX_STEPS`

`cost` is the median time of a snapshot's copies, and `step` the median time of a step without them.
Until a first interval is known, each step is due; a later measurement uses the snapshots of the
present interval. The first two snapshots don't count, because they allocate memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from paceline.cluster.membership.snapshot_name import SnapshotName
from paceline.errors import Message, ReplicasDiffer
from paceline.generation.run import Run
from paceline.generation.summaries import StepSummary
from paceline.replica.checksums import ChecksumParts, Parts
from paceline.replica.group import AnyReplica
from paceline.replica.state_parts import DIVISION, POSITION
from paceline.snapshots.backup import SnapshotBackup
from paceline.snapshots.commits import SnapshotCommits
from paceline.snapshots.copier import Receiver, SeveralCopiers, StateCopier
from paceline.snapshots.division import (
    DividedCopies,
    Division,
    can_divide,
    fetch_divided,
    note_of,
)
from paceline.snapshots.narrow import WithoutNarrow
from paceline.snapshots.objects import StateObjects
from paceline.snapshots.own_part import OwnPart
from paceline.snapshots.replica_check import ReplicaCheck
from paceline.snapshots.restore import restore_state
from paceline.snapshots.store import Borrowed, SnapshotStore, memory_note
from paceline.timeline.timeline import SETTLE

OFF = -1  # instead of an interval: no more snapshots
MAX_STEPS = 1_000  # that a run repeats after it has lost a rank
_COST = 0.009  # of the time; what is promised is 1%, and some copies take longer
_SKIPPED = 2  # of a generation's snapshots: the first are slower
_COUNTED = 5  # snapshots that are measured


class StepSnapshots:
    """Snapshots of one rank at step boundaries.

    Args:
        run: the run, whose present generation names the snapshots.
        replica: the model's replica, whose steps copy the state.
        objects: the objects whose state is copied.
        enabled: whether snapshots are taken.
        interval: the interval that an earlier start measured, in steps; 0: it is measured.
        limit_mb: the limit of their memory in MiB; 0: no limit.
        report: called on rank 0 with a sentence for the user.
        check: whether replicas are checked.
        backup: sends what this rank alone has to its backup holder; None: no rank has copies.
        divides: whether each rank copies a part of the state only, where that can be (`divided`).

    Attributes:
        objects: the objects whose state is copied.
        check: the replica check, which compares what is copied.
        commits: commits what all ranks hold, and has copies of other ranks' parts.
        interval: the interval between snapshots, in steps; 0 until the first one is measured.
        enabled: whether snapshots are taken, as long as there is memory.
        divides: as the argument; the same on all ranks.
    """

    def __init__(
        self,
        run: Run,
        replica: AnyReplica,
        objects: StateObjects,
        *,
        enabled: bool = True,
        interval: int = 0,
        limit_mb: float = 0.0,
        report: Callable[[Message], object] = lambda note: None,
        check: bool = True,
        backup: SnapshotBackup | None = None,
        divides: bool = False,
    ) -> None:
        self._run = run
        self._replica = replica
        self.objects = objects
        self._limit_mb = limit_mb
        self._report = report
        self._snapshots = SnapshotStore()
        self.interval = interval
        # Seconds of each step, the copies' included, and of these; None: no interval is measured.
        self._times: list[tuple[float, float]] | None = None if interval else []
        self.enabled = enabled
        self.divides = divides
        self._survives = backup is not None
        self._division: tuple[tuple[str, int], Division] | None = None  # by what it is of
        self._copying: tuple[SnapshotName, StateCopier] | None = None  # in the present step
        self._off = False
        self.check = ReplicaCheck(run, enabled=check)
        self._summed: tuple[int, ChecksumParts] | None = None  # a step, and the state before it
        self._copied = 0.0  # seconds of copies until the present step
        self._between = 0
        self._checked = 0.0  # seconds of checks before the present one
        self._bindings = replica.bindings  # during which the interval is measured
        # Received, and obeyed by all ranks at a later boundary.
        self._summaries: deque[StepSummary] = deque()
        self._copied_alone = 0  # copies that no other rank has
        self.commits = SnapshotCommits(run, self._snapshots, len(objects.pairs), backup, replica)

    @property
    def held(self) -> tuple[SnapshotName, ...]:
        """Names of the snapshots that this rank holds, oldest first."""
        return self._snapshots.held

    @property
    def on(self) -> bool:
        """Whether snapshots are taken; the same on all ranks."""
        return self.enabled and not self._off

    @property
    def alone(self) -> bool:
        """Whether this rank is the only one, so that what it holds is committed."""
        return self._run.context.summaries.alone

    @property
    def divided(self) -> bool:
        """Whether each rank copies a part of the state only; the same on all ranks.

        Replicas must be equal, and some of their ranks survive a loss.
        """
        if not self.divides:
            return False
        context = self._run.context
        equal = self._replica.rounds is None and self._replica.equal_between_steps
        possible = equal and self._survives and not context.mesh.divided
        return possible and can_divide(context.world.generation)

    def free(self, step: int) -> bool:
        """Return whether a snapshot before a step can be taken; the same on all ranks.

        There is none while two are held of which the newer isn't committed, and no second one
        before a step.
        """
        held = [name.step for name in self.held]
        return self.on and not self._snapshots.full and step not in held

    @property
    def newest_committed(self) -> SnapshotName | None:
        """Name of the newest snapshot that all ranks hold, None before there is one."""
        return self._snapshots.newest_committed

    def borrow(self) -> Borrowed | None:
        """Return the newest committed snapshot, None before there is one; from any thread."""
        return self._snapshots.borrow()

    def obey(self, *, before: int, wait: bool = False) -> SnapshotName | None:
        """Obey summaries of steps below `before`, until one commits a snapshot; return its name.

        Args:
            before: a step.
            wait: then wait until all ranks acknowledge what isn't committed yet; collective.
        """
        while (name := self.commits.commit_next()) is None:
            if self._summaries and self._summaries[0].step < before:
                self._obey_summary(self._summaries.popleft())
            elif not (wait and self.commits.wait()):
                return None
        return name

    def takes(self, step: int, *, wanted: bool = False) -> bool:
        """Return whether `take` copies the state before a step, with the same arguments."""
        return (wanted or self._is_due(step)) and self.free(step)

    def take(self, step: int, position: Mapping[str, Any], *, wanted: bool = False) -> None:
        """Let the step that begins copy the state before it, if a snapshot is due.

        A rank alone copies at once. So do ranks that read other parameters in a step: once they are
        equal; and ranks that average, at a round's end.

        Args:
            step: the step's number; summaries are obeyed before it.
            position: of the run; plain values by name.
            wanted: it is due, whatever the interval.
        """
        self._copied = self._copying_seconds()
        if not self.takes(step, wanted=wanted):
            return
        if self.alone:
            self.take_between_steps(step, position)
        elif self._replica.rounds is None and not self._replica.equal_between_steps:
            with self._run.timeline.span(SETTLE):
                self._replica.synchronize()
            self._replica.copy_now(self._copier(self._name(step), position))
        elif self._replica.rounds is not None:
            # Within a round weights differ; at its end the anchor is equal everywhere.
            self._replica.copy_now(self._copier(self._name(step), position))
        else:
            copier = self._copier(self._name(step), position)
            self._copying = self._name(step), copier
            self._replica.copy_in_step(copier)

    def take_between_steps(self, step: int, position: Mapping[str, Any]) -> None:
        """Copy the state before a step at once, and commit it; collective, by all ranks.

        It returns once all ranks have acknowledged it, and everything older. All summaries of
        earlier steps are received.

        Args:
            position: of the run; plain values by name.

        Raises:
            ReplicasDiffer: it differs between ranks.
        """
        while self.obey(before=step, wait=True) is not None:
            pass
        if self.on:
            self._between += 1  # a script may call this again before a step
            token = f"{self._run.context.world.generation.key_prefix}/{self._between}"
            name = SnapshotName(token, step)
            bound = self._replica.copy_now(self._copier(name, position))
            if not self.alone:
                try:
                    self.check.compare(step, self._comparable(name, step) if bound else None)
                except ReplicasDiffer:
                    self.discard()
                    raise
            self.commits.wait()
            self.commits.commit_next()

    def copy_alone(self, step: int, position: Mapping[str, Any]) -> Borrowed:
        """Copy the settled state before a step, which no other rank holds; local.

        Args:
            position: of the run, with all sums; plain values by name.
        """
        own = SnapshotStore()
        name = SnapshotName(f"own/{self._copied_alone}", step)
        self._copied_alone += 1
        whole = {**position, "sent": {}, "members": ()}
        self._replica.copy_now(StateCopier(own, name, self.objects, whole), own=False)
        own.commit(name)
        borrowed = own.borrow()
        assert borrowed is not None
        return borrowed

    def check_state(self, step: int) -> None:
        """Let the step that begins sum the state before it, where no snapshot copies it."""
        rare = self._replica.rounds is not None  # snapshots, which otherwise are compared
        if not (rare or self._replica.equal_between_steps):
            return
        copying = None  # a part of it
        if self._partial and self._copying is not None and self._copying[0] == self._name(step):
            copying = self._copying[1]
        if (rare or not self.on or copying is not None) and not self.alone:
            parts = self._new_checksums()
            self._summed = step, parts
            self._checked = self._run.timeline.seconds("check")
            summing = self._summing_copier(parts, step)
            both = summing if copying is None else SeveralCopiers([copying, summing])
            self._replica.copy_in_step(both)

    def compare(self, step: int) -> None:
        """Settle, and compare the state before a step at once, without a snapshot; collective.

        Raises:
            ReplicasDiffer: it differs between ranks.
        """
        if self.check.enabled and not self.alone:
            parts = self._new_checksums()
            self.check.compare(step, parts if self.add_state(parts, step) else None)

    def add_state(self, parts: ChecksumParts, step: int) -> bool:
        """Settle, and add the state before a step to checksums; local.

        Returns:
            whether all its parameters are bound; others get rank 0's values in the next step.
        """
        return self._replica.copy_now(self._summing_copier(parts, step), own=False)

    def checksum_code(self, step: int) -> tuple[int, int]:
        """Return the code of the checked state before a step, and an interval; 0 without one."""
        if self._summed is not None and self._summed[0] == step:
            parts = self._summed[1]
            self._summed = None
            spent = self._run.timeline.seconds("check") - self._checked
            return self.check.checksum_code(step, parts, spent)
        whole = self._replica.rounds is None and not self._partial
        if self.alone or not whole or not self.holds(step):
            return 0, 0
        return self.check.checksum_code(step, self._snapshots.state(self._name(step)))

    def discard(self) -> None:
        """Discard all snapshots, because the replicas differ, or memory is short."""
        self._snapshots.clear()
        self.commits.discard()

    def holds(self, step: int) -> bool:
        """Return whether this rank holds the snapshot of the state before a step."""
        return self._name(step) in self._snapshots.held

    def measure(self, seconds: float) -> int:
        """Take the time of a step; return the interval to ask all ranks for, as rank 0; 0: none.

        The interval is measured anew where the replica was bound anew: its steps then take another
        time, because of another exchange, other trained parameters or other ranks.
        """
        if not self._run.leads or not self.on:
            return 0
        if self._bindings != self._replica.bindings:
            self._bindings = self._replica.bindings
            self._times = []
        copied = self._copying_seconds()
        copying = copied - self._copied
        self._copied = copied
        choice = 0
        if self._times is not None:
            self._times.append((seconds, copying))
            if copying:  # a further snapshot counts
                choice = interval_of(self._times)
            if choice:
                self._times = None
        too_large = memory_note(self._snapshots.nbytes_required, self._limit_mb)
        return OFF if too_large else choice

    def receive(self, summary: StepSummary) -> None:
        """Take note of a summary, which all ranks obey at the same boundary."""
        self._summaries.append(summary)
        self.commits.note_sums(summary)

    def restore(
        self, name: SnapshotName, *, objects: bool = True
    ) -> tuple[dict[str, Any], OwnPart, Parts]:
        """Restore a snapshot that all ranks of the next generation hold, and drop newer ones.

        Older ones stay until the generation commits one of its own.

        Args:
            objects: restore model, optimizer and tracked objects. Otherwise they stay as they are.

        Returns:
            the position that `take` was given, what this rank alone has of it, and its parts.
        """
        self._summaries.clear()
        self._between = 0
        self._snapshots.start_from(name)
        self.commits.leave_generation(name)
        state = self._snapshots.state(name)
        position = dict(state[POSITION])
        self.interval = position["snapshot_interval"]
        self._off = False
        if objects and DIVISION not in state:
            restore_state(state, self.objects)
        del position["sent"], position["members"]
        return position, self.commits.own_part(name), state

    def restore_divided(self, name: SnapshotName) -> int:
        """Restore the objects of a divided snapshot; collective among the next generation's ranks.

        Returns:
            the number of bytes that the ranks broadcast; 0 where the snapshot isn't divided.

        Raises:
            CommError: a peer was lost, or silent.
        """
        state = self._snapshots.state(name)
        if DIVISION not in state:
            return 0
        whole, fetched = fetch_divided(state, self._run.context.group("all", "steps"))
        restore_state(whole, self.objects)
        return fetched

    def begin_anew(self) -> None:
        """Drop all snapshots: the next generation starts from the durable state."""
        self._summaries.clear()
        self._between = 0
        self._snapshots.clear()
        self.commits.leave_generation(None)

    def continue_from(self, interval: int) -> None:
        """Take snapshots again, with the interval that the durable state has; 0: it is measured."""
        self.interval = interval
        self._off = False

    def _copier(self, name: SnapshotName, position: Mapping[str, Any]) -> StateCopier:
        context = self._run.context
        ids = tuple(member.id for member in context.world.generation.members)
        position = {**position, "sent": dict(context.summaries.sent), "members": ids}
        receiver: Receiver = self._snapshots
        if self.divided:
            receiver = DividedCopies(self._snapshots, self._present_division())
        if (masters := self._replica.masters) is not None:
            receiver = WithoutNarrow(receiver, masters)
        return StateCopier(receiver, name, self.objects, position, self._run.timeline)

    def _present_division(self) -> Division:
        """Return how the present ranks divide the parameters that are bound now."""
        world = self._run.context.world
        key = (world.generation.key_prefix, self._replica.bindings)
        if self._division is None or self._division[0] != key:
            names = self._replica.all_names
            self._division = key, Division.of(world.generation, world.rank, names)
            if self._run.leads:
                self._report(note_of(world.generation))
        return self._division[1]

    @property
    def _partial(self) -> bool:
        """Whether a rank's copy lacks some of what is to be compared."""
        return self.divided or self._replica.masters is not None

    def _summing_copier(self, parts: ChecksumParts, step: int) -> StateCopier:
        """Return what adds the state before a step to checksums."""
        timeline = self._run.timeline
        return StateCopier(parts, self._name(step), self.objects, {}, timeline, "check")

    def _copying_seconds(self) -> float:
        """Return the time of all copies so far, and of what they waited for."""
        timeline = self._run.timeline
        return timeline.seconds("snapshot") + timeline.seconds(SETTLE)

    def _is_due(self, step: int) -> bool:
        """Return whether the interval asks for a snapshot; of averaged weights, where rounds end.

        A round's end is due if the interval asks for one in the round.
        """
        rounds = self._replica.rounds
        if rounds is None:
            return step_is_due(step, self.interval)
        began, ended = rounds.last_round
        steps = range(began + 1, ended + 1)
        return step == ended and any(step_is_due(each, self.interval) for each in steps)

    def _new_checksums(self) -> ChecksumParts:
        """Make checksums of what ought to be equal on all ranks; of rounds, the anchor."""
        return ChecksumParts(parameters_only=self._replica.rounds is not None)

    def _comparable(self, name: SnapshotName, step: int) -> Parts | ChecksumParts:
        """Return what of a held snapshot, of the settled state, ought to be equal on all ranks."""
        state = self._snapshots.state(name)
        if self._partial:
            summed = self._new_checksums()
            self.add_state(summed, step)
            return summed
        if self._replica.rounds is None:
            return state
        parts = self._new_checksums()
        parts.add(name, state)
        return parts

    def _obey_summary(self, summary: StepSummary) -> None:
        """Take note of the snapshots that all ranks acknowledge, and of rank 0's interval."""
        self.commits.receive(summary)
        if summary.interval == OFF and not self._off:
            note = memory_note(self._snapshots.nbytes_required, self._limit_mb)
            if note is not None and self._run.leads:
                self._report(note)
            self._off = True
            self.discard()
        elif summary.interval:
            self.interval = summary.interval

    def _name(self, step: int) -> SnapshotName:
        return SnapshotName(self._run.context.world.generation.key_prefix, step)


def step_is_due(step: int, interval: int) -> bool:
    """Return whether an interval asks for a snapshot before a step; 0 asks for each."""
    return not interval or step % interval == 0


def interval_of(times: Sequence[tuple[float, float]]) -> int:
    """Return the interval, in steps; 0 as long as too few snapshots were taken.

    Args:
        times: of each step in seconds: the whole step, and the copies in it, 0 without a snapshot.
    """
    copies = [number for number, (_, copying) in enumerate(times) if copying > 0]
    if len(copies) < _SKIPPED + _COUNTED:
        return 0
    # Steps count from the same moment as copies do: both medians are of the same stretch.
    counted = times[copies[_SKIPPED - 1] + 1 :]
    cost = median(copying for _, copying in counted if copying > 0)
    step = median(seconds - copying for seconds, copying in counted)
    cheap = (steps for steps in range(1, MAX_STEPS) if cost < _COST * step * steps)
    return next(cheap, MAX_STEPS)
