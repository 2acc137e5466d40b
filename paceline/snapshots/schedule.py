"""When a run's state is written to disk, and from which snapshot: decided alike on all ranks.

    boundary n       a checkpoint is due: all ranks take a snapshot in step n
    boundary n + 2   all ranks have acknowledged it, or later: rank 0 begins to write it

    boundary n       ranks have state of their own: settle, take one at once, gather at rank 0

In the first case training waits only for copies, and a signal in a long step finds the newest
snapshot that all ranks hold. In the second case, the state is also copied and gathered between two
checkpoints, as often as it costs under half a per cent of the time. Rank 0's clock decides, and its
request reaches all ranks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any, Protocol

from paceline.comm.communicator import broadcast_state
from paceline.generation.run import Run
from paceline.generation.summaries import StepSummary
from paceline.replica.group import AnyReplica
from paceline.replica.state_parts import DIVISION, POSITION
from paceline.snapshots.checkpoint_entries import all_plain, fits, make_checkpoint
from paceline.snapshots.position import Position
from paceline.snapshots.step_snapshots import StepSnapshots
from paceline.snapshots.store import Borrowed
from paceline.state.checkpoint_writer import Checkpoint, CheckpointWriter

_COST = 0.005  # of the time, for gathering
_TRIES = 10  # to make a file, each after a newer snapshot was committed


@dataclass(frozen=True, kw_only=True)
class SavePolicy:
    """Schedule of checkpoints within an epoch, by steps and by minutes; 0 disables an interval."""

    steps: int = 0
    minutes: float = 0.0

    def due_by_steps(self, number: int) -> bool:
        """Return whether one is due before step `number`."""
        return self.steps > 0 and number % self.steps == 0

    def due_by_time(self, seconds: float) -> bool:
        """Return whether one is due so many seconds after the last."""
        return 0 < self.minutes * 60 <= seconds


class Request(IntEnum):
    """Request of rank 0 to all ranks for the next step boundary.

    Attributes:
        NOTHING: none.
        COPY: settle and copy the state, for a stop signal.
        SAVE: write a checkpoint.
    """

    NOTHING = 0
    COPY = 1
    SAVE = 2


class Settling(Protocol):
    """Protocol of the step driver, as far as a checkpoint waits for it."""

    def settle(self) -> Position:
        """Settle the replica, and receive all summaries; collective.

        Returns:
            the run's position.
        """


class CheckpointSchedule:
    """Checkpoint schedule: decides alike on all ranks when to copy and when to save.

    Args:
        run: the run, whose present ranks decide alike.
        replica: this rank's model replica.
        snapshots: this rank's snapshots; rank 0 decides whether they are taken.
        writer: writes checkpoints while this process is rank 0; None where nothing is saved.
        policy: when to save within an epoch; that of the first rank 0 is used.
        steps: makes the steps.

    Raises:
        CommError: a rank didn't come in time.
    """

    def __init__(
        self,
        run: Run,
        replica: AnyReplica,
        snapshots: StepSnapshots,
        writer: CheckpointWriter | None,
        policy: SavePolicy,
        steps: Settling,
    ) -> None:
        self._run = run
        self._replica = replica
        self._snapshots = snapshots
        self._writer = writer
        self._steps = steps
        self._sums: dict[int, list[float]] = {}  # of the epoch up to a step, over all ranks
        # The newest checkpoint that was copied at once, where no snapshot can be used.
        self._copied: Checkpoint | None = None
        # Whether checkpoints can be made of snapshots, when that was last looked at.
        self._plain = all_plain(snapshots.objects)
        what = "the broadcast of rank 0's decisions"
        settings = [writer is not None, asdict(policy), snapshots.on, snapshots.check.due]
        settings.append(snapshots.divides)
        received = broadcast_state(run.context.group("all", "steps"), settings, what)
        self._saving: bool = received[0]
        _, intervals, snapshots.enabled, snapshots.check.due, snapshots.divides = received
        self._policy = SavePolicy(**intervals)
        if writer is not None:
            writer.memory = self
        self.begin_generation(0, saved=True)

    def begin_generation(self, number: int, *, saved: bool) -> None:
        """Discard the requests and the due checkpoints of the last generation.

        Args:
            number: of the run's completed steps.
            saved: a checkpoint of this state exists; otherwise it may be due again.
        """
        # Rank 0's requests, by the steps that reported them; carried out two boundaries later.
        self._requests = deque([(number - 2, Request.COPY)])
        self._due: set[int] = set()  # steps whose snapshots will be written
        self._sums = {step: sums for step, sums in self._sums.items() if step < number}
        self._copied = None
        if self._writes is not None:
            self._writes.begin_generation(number)
        self._saved_at = time.monotonic()
        self._saved_number = number if saved else number - 1
        self._copied_at = time.monotonic()
        self._cost = 0.0

    def discard(self) -> None:
        """Discard all states in memory, because the replicas differ: no file is made of them."""
        self._snapshots.discard()
        self._copied = None
        self._due.clear()

    @property
    def saving(self) -> bool:
        """Whether files are written; the same on all ranks."""
        return self._saving

    @property
    def compares(self) -> bool:
        """Whether `end_steps` and `save` compare the replicas; the same on all ranks."""
        return self._saving and self._snapshots.on and self._replica.rounds is None

    @property
    def active(self) -> bool:
        """Whether any snapshot or checkpoint is made; the same on all ranks."""
        return self._saving or self._snapshots.on

    def receive(self, summary: StepSummary, sums: list[float]) -> None:
        """Take note of rank 0's request in a step's summary, and of the sums up to this step."""
        self._snapshots.receive(summary)
        if summary.request:
            self._requests.append((summary.step, Request(summary.request)))
        self._sums[summary.step] = sums

    def report(self, number: int, seconds: float) -> tuple[int, Sequence[bool], int]:
        """Return what this rank reports after step `number`, which took so many seconds.

        Returns:
            a request, as rank 0; which uncommitted snapshots this rank acknowledges; and the
            interval between snapshots to ask for, as rank 0.
        """
        request = 0 if self._snapshots.alone else self._request(number + 1)
        return request, self._snapshots.commits.report(number), self._snapshots.measure(seconds)

    def at_boundary(self, number: int, position: Position) -> None:
        """Begin to write what is committed by now, and copy or save before step `number` if due.

        Args:
            number: of the step that begins.
            position: of the run, which gets the interval between snapshots.

        Raises:
            CommError: a peer was lost, or silent.
            CheckpointError: an earlier checkpoint couldn't be written.
        """
        self._publish_committed(before=number - 1)
        newest = self._snapshots.newest_committed
        done = position.number
        self._forget_sums(before=number if newest is None else newest.step)
        request = self._due_request(number, done)
        if self._due and not self._snapshots.on:  # were switched off since
            self._due = set()
            request = Request.SAVE
        wanted = request is Request.SAVE and self._by_snapshots and self._snapshots.free(number)
        if wanted:
            self._due.add(number)
            self._note_saved(done)
        elif request is Request.SAVE and (self._all_copy or self._writes is not None):
            self.save()
        elif request is Request.COPY and self._copies:
            self._copy_now(together=False)
        next_is_due = self._by_snapshots and self._due_by_steps(number + 1)  # and will want room
        useful = self._saving or not self._snapshots.alone
        if wanted:
            self._snapshots.check.require(number)
        due = wanted or (useful and not next_is_due)
        if due and self._snapshots.takes(number, wanted=wanted):
            if self._snapshots.alone:
                self._steps.settle()  # it is committed at once, and has all sums
            self._snapshots.take(number, asdict(position), wanted=wanted)
        position.snapshot_interval = self._snapshots.interval
        if wanted and self._writes is not None and not self._look_whether_plain():
            self._due.discard(number)
            self.save(together=False)

    def end_steps(self) -> None:
        """Begin to write what is due, and copy the state after an epoch's last step; as `save`.

        An evaluation may follow, in which a signal finds this state. Where weights are averaged, it
        finds an older one: gathering all workers' weights takes as long as many merges.
        """
        self._publish_committed(before=self._steps.settle().number)
        if (self._snapshots.on or self._copies) and self._replica.rounds is None:
            self._copy_now(together=True, file=False)

    def save(self, *, best: bool = False, together: bool = True) -> None:
        """Settle, copy the state before the next step, and begin to write it.

        Collective, unless ranks have no state of their own and rank 0 saves by itself.

        Args:
            best: it is the best so far.
            together: all ranks call it, so that they commit the snapshot.

        Raises:
            CheckpointError: an earlier checkpoint couldn't be written.
        """
        checkpoint, number = self._copy_now(best=best, together=together)
        if self._writes is not None and checkpoint is not None:
            self._writes.publish(checkpoint)
        if together:
            self._note_saved(number)
        else:  # other ranks don't know, and decide by `_saved_number`
            self._saved_at = time.monotonic()

    def newest(self) -> Checkpoint | None:
        """Return the newest state in memory of which a file can be made; from any thread."""
        if not self._plain or self._gathers:
            return self._copied
        for _ in range(_TRIES):  # another thread may commit a newer one, and forget sums
            borrowed = self._snapshots.borrow()
            if borrowed is None or DIVISION in borrowed.state:
                return self._copied
            sent = borrowed.state[POSITION]["sent"]
            sums = self._sums
            if not sent or max(sent) in sums:
                return self._make(borrowed, sums)
        return None

    @property
    def _writes(self) -> CheckpointWriter | None:
        """The writer, while this process is the first that has its part; else None."""
        return self._writer if self._run.context.writes else None

    @property
    def _gathers(self) -> bool:
        """Whether ranks have state of their own, which rank 0 must gather; the same on all."""
        return self._replica.stateful

    @property
    def _all_copy(self) -> bool:
        """Whether all ranks take part where the state is copied at once; the same on all."""
        return self._gathers or (self._snapshots.on and not self._snapshots.alone)

    @property
    def _by_snapshots(self) -> bool:
        """Whether files are made of the snapshots of steps; the same on all ranks."""
        return self._all_copy and not self._gathers and not self._snapshots.divided

    @property
    def _copies(self) -> bool:
        """Whether state is also copied between checkpoints, for a stop signal."""
        return self._gathers or (self._writes is not None and not self._plain)

    def _request(self, number: int) -> Request:
        """Return rank 0's request after `number` steps; each is made once."""
        if self._writer is None or not self._run.leads:
            return Request.NOTHING
        now = time.monotonic()
        if self._policy.due_by_time(now - self._saved_at) and number > self._saved_number:
            self._saved_at = now
            return Request.SAVE
        if self._copies and self._cost <= _COST * (now - self._copied_at):
            self._copied_at = now
            return Request.COPY
        return Request.NOTHING

    def _due_request(self, number: int, done: int) -> Request:
        """Return what is due before step `number`, by rank 0's requests and the policy.

        Args:
            number: of the step.
            done: number of completed steps; smaller than `number` where a step trains several
                batches.
        """
        requests = [Request.NOTHING]
        while self._requests and self._requests[0][0] <= number - 2:
            step, request = self._requests.popleft()
            if request is Request.COPY or step >= self._saved_number:  # else it was saved since
                requests.append(request)
        if not self._saving:
            return Request.NOTHING
        if self._snapshots.alone:
            requests.append(self._request(done))
        if done > self._saved_number and self._due_by_steps(done):
            requests.append(Request.SAVE)
        return max(requests)

    def _due_by_steps(self, number: int) -> bool:
        return self._saving and self._policy.due_by_steps(number)

    def _look_whether_plain(self) -> bool:
        """Look whether checkpoints can be made of snapshots now, and return it."""
        self._plain = all_plain(self._snapshots.objects)
        return self._plain

    def _forget_sums(self, *, before: int) -> None:
        """Forget the sums that no snapshot from that before a step on needs."""
        last = max((step for step in self._sums if step < before), default=before)
        self._sums = {step: sums for step, sums in self._sums.items() if step >= last}

    def _make(
        self,
        snapshot: Borrowed,
        sums: Mapping[int, list[float]],
        gathered: Mapping[str, Any] | None = None,
        *,
        best: bool = False,
    ) -> Checkpoint:
        generation = self._run.context.world.generation
        objects = self._snapshots.objects
        return make_checkpoint(
            snapshot, objects, generation, sums, gathered, plain=self._plain, best=best
        )

    def _note_saved(self, number: int) -> None:
        self._saved_at = time.monotonic()
        self._saved_number = number

    def _publish_committed(self, *, before: int, wait: bool = False) -> None:
        """Commit by the summaries of steps below `before`, and begin to write what was due.

        With `wait`, commit all snapshots; collective.
        """
        while (name := self._snapshots.obey(before=before, wait=wait)) is not None:
            if name.step in self._due:
                self._due.discard(name.step)
                self._publish_newest()

    def _publish_newest(self) -> None:
        """Begin to write the newest committed snapshot, as a rank that writes."""
        borrowed = self._snapshots.borrow()
        if self._writes is None or borrowed is None:
            return
        objects = self._snapshots.objects
        if self._look_whether_plain() and fits(borrowed.state, objects, self._replica.all_names):
            self._writes.publish(self._make(borrowed, self._sums))
        else:
            self.save(together=False)

    def _copy_now(
        self, *, best: bool = False, together: bool = True, file: bool = True
    ) -> tuple[Checkpoint | None, int]:
        """Settle and copy; return the checkpoint on rank 0, and the step that it precedes.

        Without `file` no checkpoint is needed, and none is made where snapshots are divided: that
        would be a whole copy.
        """
        began = time.monotonic()
        position = self._steps.settle()
        borrowed = None
        number = position.number
        if not self._saving:
            return None, number
        collective = together or self._gathers or self._snapshots.alone
        if collective:
            self._publish_committed(before=number, wait=True)  # which may switch snapshots off
        divided = self._snapshots.divided
        averaged = self._replica.rounds is not None  # files are made of what rank 0 gathers
        if self._snapshots.on and (together if averaged else collective):
            self._snapshots.take_between_steps(number, asdict(position))  # none goes back behind it
            if self._writes is not None and not averaged and not divided:
                borrowed = self._snapshots.borrow()
        if self._writes is not None and borrowed is None and (file or not divided):
            borrowed = self._snapshots.copy_alone(number, asdict(position))
        gathered = self._replica.state() if self._gathers else None
        if borrowed is None:
            return None, number
        self._look_whether_plain()
        checkpoint = self._make(borrowed, self._sums, gathered, best=best)
        self._copied = checkpoint if self._copies else None
        self._copied_at = time.monotonic()
        self._cost = self._copied_at - began
        return checkpoint, number
