"""Recovery of a rank from the loss of its peers, between two generations of the run.

    leave_generation     the connections are closed; the model is a plain one
    go_back              the next generation is decided: its ranks, and the state to start from
        to a snapshot, which all its ranks hold, or
        to the durable state, where all copies of a part of it are lost
    record_start         the generation's first event; then the training continues

Where one of the next generation's ranks is lost meanwhile, `go_back` begins again.
"""

from __future__ import annotations

import time
import traceback
from dataclasses import asdict, replace
from typing import Protocol

from paceline.cluster.membership.generation_waits import OutsideWorld
from paceline.cluster.membership.lineage import as_values
from paceline.cluster.membership.protocol import Successor
from paceline.cluster.membership.snapshot_name import SnapshotName
from paceline.cluster.print_message import print_message
from paceline.errors import CommError, many
from paceline.generation.run import Run
from paceline.observe.change_account import ChangeAccount
from paceline.replica.group import AnyReplica
from paceline.run.recovery.durable_state import DurableState, EpochSize, sentence_of
from paceline.snapshots.own_part import values_to_send
from paceline.snapshots.position import Position
from paceline.snapshots.step_snapshots import StepSnapshots


class GenerationSteps(Protocol):
    """Protocol of what runs the steps of one generation after another."""

    def begin_generation(self, *, saved: bool) -> None:
        """Begin a generation's steps at the run's position.

        Args:
            saved: the durable state is that of the position.
        """

    def wait_for_files(self) -> None:
        """Return once all checkpoints are written and recorded."""

    def save_last(self) -> None:
        """Save, and return once rank 0 has written it. All ranks call it."""


class Recovery:
    """Recovery of a rank: it goes back to a state that others have, and enters the next generation.

    Args:
        replica: this rank's model replica.
        snapshots: the snapshots in memory.
        position: the run's position, which `go_back` sets.
        steps: runs the steps.
        account: records what a change of the generation takes.
        durable: restores the durable state, where the next generation starts from that; None: the
            run has no folder.

    Attributes:
        went_back: whether the run went back to an earlier state since this start.
    """

    def __init__(
        self,
        replica: AnyReplica,
        run: Run,
        snapshots: StepSnapshots,
        position: Position,
        steps: GenerationSteps,
        account: ChangeAccount,
        *,
        durable: DurableState | None,
    ) -> None:
        self._replica = replica
        self._run = run
        self._snapshots = snapshots
        self._position = position
        self._steps = steps
        self._account = account
        self._durable = durable
        self._start_fields: dict[str, object] = {}
        self.went_back = False
        self._decided: Successor | None = None  # that isn't entered yet

    @property
    def survives(self) -> bool:
        """Whether the loss of a peer leads to another generation; the same on all ranks."""
        return self._run.membership.survives and self._snapshots.on

    def record_start(self, origin: str | None, **fields: object) -> None:
        """Record the start of the run; that of a later generation is recorded with the same fields.

        Args:
            origin: path of another run's checkpoint from which the run starts.
            fields: of the event `run`, besides the ranks.
        """
        self._start_fields = fields
        context = self._run.context
        group = context.along("data")  # one rank of each replica counts its samples
        generation = group.generation
        self._run.recorder.event(
            "run",
            generation=generation.number,
            id=generation.id,
            start=generation.start,
            ancestors=as_values(generation.ancestors),
            rank=group.rank,
            world_size=group.size,
            members=[generation.members[rank].id for rank in group.ranks],
            machines=len(generation.workers_per_machine),
            continued=generation.first_start is not None,
            **({} if context.counts else {"counts": False}),
            **fields,
        )
        self._run.recorder.event(
            "restore",
            generation=generation.number,
            step=self._position.number,
            epoch=self._position.epoch,
            origin=origin,
        )

    def leave_generation(self, error: CommError) -> None:
        """Close the present generation's connections: the model is a plain one until `go_back`.

        Args:
            error: reports the lost connection; raised where the run can't continue.
        """
        if not self.survives:
            raise error
        self._account.lose(self._position.number)
        self._replica.leave_generation()
        self._run.context.abort()
        _clear_frames(error)

    def go_back(self, error: CommError, *, unchanged: bool = False) -> bool:
        """Go back to a snapshot, and enter the next generation; collective among its ranks.

        Where one of them is lost meanwhile, the generation after that is entered. Where all copies
        of a part of the state are lost, they go back to the durable state.

        Args:
            error: reports the lost connection.
            unchanged: go back to a snapshot of the present position only, in which model, optimizer
                and tracked objects stay as they are.

        Returns:
            whether the generation is entered; with `unchanged` it isn't, until another call, where
            its ranks have no such snapshot.

        Raises:
            CommError: there is no next generation.
            RankStateError: members that aren't in it had state that no other has.
            CheckpointError: no member can read the durable state.
            ServerLost: the run has no averaging server any more; the state is saved.
        """
        reached = replace(self._position)
        while True:
            self._account.leave()
            successor = self._decided or self._await_successor(error)
            self._decided = None
            self._account.decide(successor.detected_at)
            if unchanged and (successor.start is None or successor.start.step != reached.number):
                self._decided = successor
                return False
            try:
                if successor.start is None:
                    self._enter_from_disk(successor, reached)
                else:
                    self._enter(successor, successor.start, unchanged=unchanged)
                self._end_without_server()
                return True
            except CommError as lost:
                self.leave_generation(lost)
                error = lost

    def _await_successor(self, error: CommError) -> Successor:
        """Wait for the next generation's ranks and start; record and print them.

        Raises:
            CommError: there is none.
        """
        successor = self._run.membership.next_generation(error)
        group = successor.group
        generation = group.generation
        reasons = "; ".join(cause.rstrip(".") for cause in successor.causes if cause)
        reasons = reasons or "A connection between members was lost"
        start = f"step {generation.start:,}"
        if successor.start is None:
            reasons += (
                ". With that, all copies of a part of the state are lost, and no snapshot in "
                "memory is whole"
            )
            start = f"the durable state of {start}"
            if self._durable is None:
                raise self._without_folder(reasons, shown=group.rank == 0)
        self._run.recorder.event(
            "change",
            generation=generation.number,
            members=[member.id for member in generation.members],
            lost=successor.lost,
            causes=successor.causes,
            start=generation.start,
            seconds=successor.seconds,
            detected_at=successor.detected_at,
        )
        if group.rank == 0:
            verb = "continues" if group.size == 1 else "continue"
            print_message(
                f"{reasons}. {many(group.size, 'process')} {verb} from {start} as generation "
                f"{generation.number}, decided after {successor.seconds:.2f} s"
                f"{self._bound(generation.start)}."
            )
        return successor

    def _without_folder(self, reasons: str, *, shown: bool) -> OutsideWorld:
        sentence = f"{reasons}. The run has no run folder, and so no checkpoint."
        if shown:
            print_message(sentence)  # the supervisor reports the first loss alone
        outside = OutsideWorld(sentence)
        outside.remedy = "Start it again, with a run folder if it is to resume after such a loss."
        return outside

    def _bound(self, start: int) -> str:
        """Return how many steps are trained again at most, where workers were in different steps.

        A worker that leads this one by the staleness, and has completed its step, waits there.
        """
        lag = self._run.context.summaries.lag
        steps = self._position.number + lag - start
        return f"; at most {many(steps, 'step')} are trained again" if lag > 1 else ""

    def _enter(self, successor: Successor, start: SnapshotName, *, unchanged: bool) -> None:
        group = successor.group
        values, own, snapshot = self._snapshots.restore(start, objects=not unchanged)
        members = {member.id for member in group.generation.members}
        commits = self._snapshots.commits
        lost = [each for each in commits.members(start) if each not in members]
        parts = [own, *commits.backup_parts(start, lost)]
        self._position.set(values)
        self._note_restored()
        commits.enter_generation(group.generation)
        if self._durable is not None:
            self._durable.record(group)
        self._run.enter(group)
        if not unchanged:
            self._fetch(start)
        whole = self._replica.enter_generation([part.state for part in parts], snapshot)
        context = self._run.context
        unsummed = values_to_send(parts, commits.totals(start), context.group("all", "steps"))
        for step, sums in unsummed.items():
            context.summaries.send(step, sums, stop=False)
        self._steps.begin_generation(saved=False)
        self._record_restart(successor)
        if not whole:
            note = "The error-feedback residuals are dropped: no lossy wire is used any more."
            self._run.recorder.event("note", text=note)

    def _fetch(self, start: SnapshotName) -> None:
        """Restore a divided snapshot from the ranks that have its parts; report what that took."""
        began = time.monotonic()
        fetched = self._snapshots.restore_divided(start)
        if fetched:
            seconds = time.monotonic() - began
            size = f"{fetched / 1e6:,.1f} MB"
            note = f"The parts of the snapshot, {size}, were exchanged in {seconds:.2f} s."
            self._run.note(note, shown=self._run.leads)

    def _enter_from_disk(self, successor: Successor, reached: Position) -> None:
        assert self._durable is not None
        group = successor.group
        durable = self._durable
        self._steps.wait_for_files()  # no file of the lost steps comes later
        self._snapshots.begin_anew()
        self._snapshots.commits.enter_generation(group.generation)
        self._run.enter(group)
        restored = durable.restore(reached)
        durable.record(group)
        sums = restored.position.sums or [0.0] * len(self._position.sums)
        self._position.set({**vars(restored.position), "sums": sums})
        self._snapshots.continue_from(self._position.snapshot_interval)
        self._note_restored()
        self._replica.enter_generation(None)
        durable.restore_exchange()
        self._steps.begin_generation(saved=True)
        self._record_restart(successor)
        samples = self._start_fields.get("samples")
        batch = self._start_fields.get("batch")
        size = None
        if isinstance(samples, int) and isinstance(batch, int):
            size = EpochSize(samples=samples, batch=batch)
        durable.report(sentence_of(reached, replace(restored, position=self._position), size))

    def _note_restored(self) -> None:
        self._account.restore(self._position.number, self._snapshots.interval)
        self.went_back = True

    def _record_restart(self, successor: Successor) -> None:
        if self._start_fields:  # otherwise the run's first step is still to record it
            self.record_start(None, **self._start_fields)
        generation = self._run.context.world.generation.number
        self._run.recorder.event("recovery", generation=generation, **asdict(self._account.enter()))
        if successor.risk:
            self._run.recorder.event("note", text=successor.risk)

    def _end_without_server(self) -> None:
        """Save what all ranks have gone back to, and end, where the averaging server is lost."""
        rounds = self._replica.rounds
        if rounds is not None and rounds.ends is not None:
            self._steps.save_last()
            raise rounds.ends


def _clear_frames(error: BaseException | None) -> None:
    """Release what the frames of an error and of its causes have of a generation's memory."""
    if error is not None:
        traceback.clear_frames(error.__traceback__)
        _clear_frames(error.__cause__)
        if error.__context__ is not error.__cause__:  # an error may have both, and others
            _clear_frames(error.__context__)
