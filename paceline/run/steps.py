"""Steps of a run: exchanged, recorded (each emits a `step` event), saved, stopped.

    begin: boundary ── random streams ── the replica's step …  end: event ── send summary
              └ summary of the step before the last; save; stop where all ranks agreed to

State is saved at a boundary, the moment before a step: it then contains the last step's result, the
schedule and the epoch's end. All ranks receive the same summaries, so they stop at the same
boundary. What rank 0 decides by its clock is a request that all ranks receive, so that they take
the same snapshots (`CheckpointSchedule`):

    step n  send(n, request=…) ── step n + 1 ── boundary n + 2  receive(before=n + 1), snapshot
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import repeat
from queue import Empty

import numpy as np
import torch
from torch import Tensor

from paceline.algorithms.synchronizer import Weights
from paceline.cluster.supervision.allocator import HoleTrims
from paceline.cluster.supervision.stop_signals import StopSignals
from paceline.comm.communicator import gather_counts, total
from paceline.data import splitmix
from paceline.data.batch_slice import BatchSlice
from paceline.errors import CommError, ConfigError, ReplicasDiffer
from paceline.generation.run import Run
from paceline.generation.summaries import NONE_ACKNOWLEDGED, StepSummary
from paceline.observe.change_account import ChangeAccount
from paceline.replica.backward_calls import watch_backward_calls
from paceline.replica.checksums import ChecksumParts, Checksums
from paceline.replica.group import STEPPED_BITS, AnyReplica
from paceline.run.extension import Extension
from paceline.run.recovery.durable_state import DurableState
from paceline.run.recovery.recovery import Recovery
from paceline.snapshots.position import Position
from paceline.snapshots.schedule import CheckpointSchedule, SavePolicy
from paceline.snapshots.step_snapshots import StepSnapshots
from paceline.state.checkpoint_parts import CheckpointParts
from paceline.state.checkpoint_writer import CheckpointWriter
from paceline.timeline.timeline import SETTLE

# Purposes of random streams: inside a step, and before it. Runs on disk fix them.
_IN_STEP = 3
_BEFORE_STEP = 4


class Stop(Exception):
    """Exception that stops the run at a step boundary, after the state has been saved."""


class Steps:
    """Step driver: begins, ends and records steps, and saves or stops at step boundaries.

    Args:
        replica: this rank's model replica.
        run: the run, whose recorder receives one event per step, with the timeline's account of it.
        writer: writes checkpoints while this process is rank 0; None where nothing is saved.
        parts: knows which checkpoints are written, where they are in parts; None: they aren't.
        seed: seed of the random streams.
        position: the run's position, which each step advances.
        policy: when to save checkpoints within an epoch.
        requests: know whether this rank was asked to stop.
        snapshots: takes snapshots in memory.
        durable: restores the durable state, where the next generation starts from that.
        extensions: what else the steps do, in the same order on all ranks.

    Attributes:
        position: the run's position.
        recovery: goes back and enters the next generation where a peer is lost.
    """

    def __init__(
        self,
        replica: AnyReplica,
        run: Run,
        writer: CheckpointWriter | None,
        *,
        seed: int,
        position: Position,
        policy: SavePolicy,
        requests: StopSignals,
        snapshots: StepSnapshots,
        durable: DurableState | None = None,
        parts: CheckpointParts | None = None,
        extensions: Sequence[Extension] = (),
    ) -> None:
        self._extensions = extensions
        self._snapshots = snapshots
        self._check = snapshots.check
        self._replica = replica
        self.run = run
        self._writer = writer
        self._parts = parts
        self._seed = seed
        self._batch: BatchSlice | None = None  # of the step under way
        self._further = False  # that step trains the batch of the last one, too
        self._began = 0.0
        self._spans = ExitStack()  # of that step, entered
        self._holes = HoleTrims()
        self._before_first_backward = False  # whether the step has had no backward pass yet
        self.position = position
        self._requests = requests
        self._value_count = len(position.sums)
        self._checkpoints = CheckpointSchedule(run, replica, snapshots, writer, policy, self)
        self._account = ChangeAccount(run.timeline)
        self.recovery = Recovery(
            replica, run, snapshots, position, self, self._account, durable=durable
        )
        self.begin_generation(saved=True)
        watch_backward_calls(self)

    def before_backward(
        self, outputs: Sequence[object], inputs: Sequence[object], *, create_graph: bool
    ) -> None:
        """Before a step's first backward pass, give freed memory back, if that is due."""
        if self._before_first_backward:
            self._before_first_backward = False
            self._holes.before_backward(self._steps_alike)

    @property
    def generation(self) -> int:
        """The number of the run's present generation, for the ledger."""
        return self.run.context.world.generation.number

    def begin_generation(self, *, saved: bool) -> None:
        """Begin a generation's steps at the position, as `GenerationSteps` does."""
        self._seeded: int | None = None  # the step for which `seed` has seeded all streams
        self._steps_alike = 0  # since the generation began, or a checkpoint gave memory back
        self._before_first_backward = False
        self._continued = 0  # which optimizers stepped an odd number of times in further steps
        self._stop_requested_in: int | None = None  # the step in which a rank asked to stop
        self._unobeyed: deque[StepSummary] = deque()  # received summaries
        self._stepped: dict[int, int] = {}  # whether a step ended by `optimizer.step()`
        self._check.begin_generation(self.position.number)
        for extension in self._extensions:
            extension.begin_generation()
        self._checkpoints.begin_generation(self.position.number, saved=saved)
        self._keeping = self._checkpoints.active  # snapshots, or checkpoints

    @property
    def holds_present(self) -> bool:
        """Whether this rank holds a snapshot of the present position."""
        held = self._snapshots.held
        return bool(held) and held[-1].step == self.position.number

    @property
    def compares(self) -> bool:
        """Whether the replicas are compared where the state is saved; the same on all ranks."""
        return self._checkpoints.compares

    def sum_values(self, count: int) -> None:
        """Sum so many values in each step, from the first one on."""
        self._value_count = count
        if len(self.position.sums) != count:
            self.position.sums = [0.0] * count

    def receive_sums(self) -> None:
        """Wait until the position has the sums of all steps.

        Raises:
            CommError: a peer was lost, or silent.
        """
        self._receive_summaries(before=self.position.number)

    def run_generations(self, train: Callable[[], None]) -> None:
        """Call `train`, which continues from the position; once more in each later generation.

        Raises:
            CommError: a peer was lost, and there is no next generation.
        """
        began = False
        while True:
            try:
                if not began:
                    began = True  # a rank that is lost meanwhile is lost to the run's beginning
                    self.take_snapshot()
                return train()
            except CommError as error:
                self.lose(error)
                lost = error
            except BaseException:
                self.abandon()
                raise
            self.recovery.go_back(lost)

    def take_snapshot(self) -> None:
        """Take a snapshot between two steps; the run goes back no further. All ranks call it.

        Raises:
            CommError: a peer was lost, or silent.
        """
        self._end_measured_steps()
        self._replica.synchronize()
        if not self._snapshots.alone:
            self._snapshots.take_between_steps(self.position.number, asdict(self.position))

    def begin(self, batch: BatchSlice, *, further: bool = False) -> Tensor:
        """Begin a step, which `end` ends; `abandon` or `lose` leave it where an error does.

        Args:
            batch: this rank's share.
            further: the step trains further models on the batch of the last one, as a part of that.
                There is no boundary, event or summary: the state in between is no position to
                resume from.

        Returns:
            (values,) float64 zeros, to fill with this rank's part of the sums. Those of a
            further step aren't summed.

        Raises:
            Stop: all ranks agreed to stop before this step.
            ConfigError: in an earlier step only some ranks called `optimizer.step()`.
            ReplicasDiffer: the replicas aren't equal any more.
            CommError: a peer was lost, or silent.
            CheckpointError: a checkpoint couldn't be written.
        """
        number = batch.number
        self._began = self.run.timeline.now()
        if not further:
            for extension in self._extensions:
                extension.begin_step(number)
            self._record_replay(number)
        self._batch = batch
        self._further = further
        self.run.context.activities.begin_step(number)
        if not further:
            self._spans.enter_context(self.run.timeline.span("step", step=number))
            self._pass_boundary(number)
            self._spans.enter_context(self.run.timeline.span("train"))
        self._replica.begin(number, batch.weight, batch.global_count)
        return torch.zeros(self._value_count, dtype=torch.float64, device=self.run.context.device)

    def end(self, sums: Tensor, *, counts: bool | None = None, **fields: object) -> None:
        """End the step: the update is frozen (there is none where no optimizer has stepped).

        Args:
            sums: what `begin` has returned, filled.
            counts: whether these are its replica's; None: the first rank of each replica has them.
            fields: more fields of the step's event.

        Raises:
            ConfigError: the step broke a rule of the exchange; names the remedy.
            CommError: a peer was lost, or silent.
        """
        assert self._batch is not None
        batch = self._batch
        number = batch.number
        self._replica.end()
        self._spans.close()
        if not self._further and self._replica.added_to_kept and self._checkpoints.saving:
            raise ConfigError(
                f"a backward in step {number} added to gradients of an earlier step, which a "
                "resumed run would lack: call optimizer.zero_grad() in each step, accumulate over "
                "several batches in world.no_sync(), or train without a run folder."
            )
        self._batch = None
        self.run.context.activities.end_step(done=True)
        if self._further:
            self._continued ^= self._replica.stepped << STEPPED_BITS
            return
        self._record_step(number, batch, fields)
        self.position.step = batch.step + 1
        self.position.number = number + 1
        self.run.membership.poll(number + 1)
        counts = self.run.context.counts if counts is None else counts
        self._send_summary(number, batch, sums if counts else torch.zeros_like(sums))
        self._steps_alike += 1

    def abandon(self) -> None:
        """Leave the step under way, if there is one: an error has ended it, or its begin."""
        if self._batch is not None:
            self._batch = None
            self._spans.close()
            self.run.context.activities.end_step(done=False)
            self._replica.abandon()

    def lose(self, error: CommError) -> None:
        """Leave the generation, and a step under way; `recovery.go_back` enters the next one.

        Args:
            error: reports the lost peer; raised where the run can't continue.
        """
        self.abandon()
        self.recovery.leave_generation(error)

    def _record_replay(self, number: int) -> None:
        """Record what was trained again, where a step is the first that wasn't trained before."""
        replayed = self._account.begin_step(number)
        if replayed is not None:
            self.run.recorder.event(
                "replay", generation=self.generation, step=number, **asdict(replayed)
            )

    def seed(self, number: int) -> None:
        """Start the random streams of what a script computes before a step begins."""
        _seed_python(self._seed_torch(_BEFORE_STEP, number))
        self._seeded = number

    def end_steps(self, *, merge: bool = False) -> list[float]:
        """End an epoch's steps; return their sums, over all ranks. All ranks call it.

        Args:
            merge: no steps follow: where weights are averaged, they are merged.

        Raises:
            Stop, CommError, CheckpointError: as `begin`.
        """
        self._end_measured_steps()
        if self._stop_requested_in is not None:
            self._stop()
        for extension in self._extensions:
            extension.leave_steps()
        with self.run.timeline.span(SETTLE):
            self._replica.settle(Weights.MERGED if merge else Weights.EQUAL)
            self._replica.synchronize()
        if not self._checkpoints.compares:  # else the copy is compared
            self._snapshots.compare(self.position.number)
        self._checkpoints.end_steps()
        for extension in self._extensions:
            extension.end_steps(self.position.number)
        return list(self.position.sums)

    def epoch_fields(self) -> dict[str, object]:
        """Return the extensions' fields of the event `epoch`; collective.

        Raises:
            CommError: a peer was lost, or silent.
        """
        return {k: v for each in self._extensions for k, v in each.epoch_fields().items()}

    def last_checksums(self) -> Checksums | None:
        """Settle, and return the checksums of the parameters after the last step; local.

        Returns:
            the checksums; None where nothing is compared, where `save` has compared the state, or
            where the script has written the parameters since the last step.
        """
        if self._checkpoints.compares or self._snapshots.alone or not self._check.enabled:
            return None
        if not self._replica.equal_between_steps:  # equal only where all ranks take part
            return None
        self._replica.settle()
        # What the script wrote is its own: rank 0 may test an average of the parameters, say.
        if not self._replica.unwritten:
            return None
        parts = ChecksumParts(parameters_only=True)
        return parts.result() if self._snapshots.add_state(parts, self.position.number) else None

    def end_epoch(self, accuracy: float | None = None) -> None:
        """Start the next epoch, and save. All ranks call it.

        Args:
            accuracy: on the test data; the checkpoint of the best one is retained.
        """
        position = self.position
        best = self.improves(accuracy)
        if best:
            position.best = accuracy
            position.best_epoch = position.epoch
        position.epoch += 1
        position.step = 0
        position.sums = [0.0] * self._value_count
        self._end_epoch()
        self.save(best=best)

    def improves(self, accuracy: float | None) -> bool:
        """Return whether an accuracy on the test data is better than that of any earlier epoch."""
        best = self.position.best
        return accuracy is not None and (best is None or accuracy > best)

    def save(self, *, best: bool = False, together: bool = True) -> None:
        """Settle, and save a checkpoint in the background.

        With `together`, and snapshots on, all ranks take and commit one. Rank 0 gathers state
        that is divided among ranks.

        Args:
            best: the state is the best so far.
            together: all ranks call it. Otherwise rank 0 alone may, where the ranks have no state
                besides model and optimizer.

        Raises:
            CommError: a peer was lost, or silent.
            CheckpointError: an earlier checkpoint couldn't be written.
        """
        if together:
            self._end_measured_steps()
        self._checkpoints.save(best=best, together=together)

    def rescue(self, leaderless: bool = False) -> int | None:
        """Write the newest state in memory to the disk, and record it; from any thread.

        Args:
            leaderless: this process writes although it isn't rank 0, which it can't reach.

        Returns:
            the number of completed steps in the newest checkpoint file, from which the run resumes;
            None where there is none, and on ranks that write none.
        """
        if self._writer is None or not (self.run.context.writes or leaderless):
            return None
        steps = self._writer.rescue()
        if self._parts is not None:
            steps = self._parts.complete()  # parts without an index are resumed by no command
        self._record_published(self._writer)
        return steps

    def finish(self, *, stopped: bool = False, together: bool = False) -> None:
        """Return once everything is on the disk, and record the end. All ranks call it.

        Args:
            stopped: a signal requested the end.
            together: where the run survives lost members, all ranks wait for the leader's files, if
                there are any.

        Raises:
            CommError: a peer was lost, or silent.
            CheckpointError: it couldn't be written.
        """
        in_parts = self._parts is not None
        if self._checkpoints.saving and (in_parts or (together and self.recovery.survives)):
            self._await_leader()
        self.wait_for_files()
        if self._parts is not None and self._checkpoints.saving:
            self._confirm_parts(self._parts)
        self.run.recorder.event("finish", stopped=stopped)

    def wait_for_files(self) -> None:
        """Return once all checkpoints are written and recorded, as `GenerationSteps` does."""
        if self._writer is not None:
            self._writer.wait()
            self._record_published(self._writer)

    def save_last(self) -> None:
        """Save, and return once rank 0 has written it, as `GenerationSteps` does."""
        self.save()
        self._await_leader()

    def _await_leader(self) -> None:
        """Return once rank 0 has written its last checkpoint, so that another one can replace it.

        The ranks communicate several times within the timeout, because a file may take longer.
        """
        context = self.run.context
        limit = context.limits[1] / 4
        written = False
        while not written:
            own = self._writer is None or not context.writes or self._writer.written(limit)
            missing = torch.tensor([not own], dtype=torch.float64)
            what = "the wait for the last checkpoint"
            written = not total(context.group("all", "steps"), missing, what).item()

    def _confirm_parts(self, parts: CheckpointParts) -> None:
        """Write the index of the last checkpoint, if all its parts are written; collective."""
        communicator = self.run.context.group("all", "steps")
        written = gather_counts(communicator, parts.written_steps, "the parts of a checkpoint")
        newest = {written[ranks[0]] for ranks in self.run.context.mesh.lines("data")}
        if self.run.leads and len(newest) == 1:
            parts.confirm(newest.pop())

    def _pass_boundary(self, number: int) -> None:
        """Save what is due before a step, or stop; then begin the step's random streams."""
        with self.run.timeline.span("boundary"):
            self._act_on_summaries(number)
            self._before_first_backward = True
        word = self._seed_torch(_IN_STEP, number)
        # Python's and numpy's streams continue where `seed` has seeded them before the step:
        # unlike torch's, they take long to seed.
        if self._seeded != number:
            _seed_python(word)
        self._seeded = None

    def _act_on_summaries(self, number: int) -> None:
        summaries = self.run.context.summaries
        # To wait for a summary that still travels would be a barrier. All ranks act on those of the
        # same steps, and therefore stop and compare at the same boundary.
        received = number - summaries.lag
        self._receive_summaries(before=received)
        acted_on = min(received, number - 1)
        self._check_replicas(before=acted_on)
        agreed = self._stop_requested_in is not None and self._stop_requested_in < acted_on
        if agreed or (summaries.alone and self._requests.status):
            self._stop()
        if self._writer is not None:
            self._writer.check()
            self._record_published(self._writer, in_step=True)
        if self._keeping:
            self._checkpoints.at_boundary(number, self.position)
        if number >= self._check.due:
            self._snapshots.check_state(number)

    def _record_step(self, number: int, batch: BatchSlice, fields: Mapping[str, object]) -> None:
        self.run.recorder.event(
            "step",
            generation=self.generation,
            step=number,
            epoch=batch.epoch,
            first=batch.first,
            last=batch.last,
            cuts=batch.cuts,
            skipped=batch.skipped,
            epoch_step=batch.step,
            steps=batch.steps,
            samples=batch.global_count,
            sums=self.position.sums,
            **fields,
            **self.run.timeline.account(number),
        )

    def _send_summary(self, number: int, batch: BatchSlice, sums: Tensor) -> None:
        request = 0
        acknowledged = NONE_ACKNOWLEDGED
        interval = 0
        if self._keeping:
            seconds = self.run.timeline.now() - self._began
            request, acknowledged, interval = self._checkpoints.report(number, seconds)
        code = 0
        check_interval = 0
        if number >= self._check.due:
            code, check_interval = self._snapshots.checksum_code(number)
        if self._replica.loaded:
            code = self._check.add_loaded(number, self._replica.loaded) or code
        outcome = self._replica.stepped | self._continued
        self._continued = 0
        self._stepped[number] = outcome
        self.run.context.summaries.send(
            number,
            sums,
            stop=self._requests.status != 0,
            request=request,
            acknowledged=acknowledged,
            interval=interval,
            outcome=outcome,
            code=code,
            check_interval=check_interval,
            rows=[extension.row(batch) for extension in self._extensions],
            written=0 if self._parts is None else self._parts.written_steps,
        )

    def _receive_summaries(self, *, before: int) -> None:
        for summary in self.run.context.summaries.receive(before=before):
            sums = zip(self.position.sums, summary.sums, strict=True)
            self.position.sums = [total + added for total, added in sums]
            self._unobeyed.append(summary)
            if summary.stop and self._stop_requested_in is None:
                self._stop_requested_in = summary.step
            if self._keeping:
                self._checkpoints.receive(summary, self.position.sums)
            if summary.written and self._parts is not None:
                self._parts.note_complete(summary.written)
                if self.run.leads:
                    self._parts.confirm(summary.written)
            for extension, row in self._rows(summary):
                extension.receive(summary, row)

    def _rows(self, summary: StepSummary) -> Iterator[tuple[Extension, Sequence[float]]]:
        # A step that is summed again after a loss has no rows.
        return zip(self._extensions, summary.rows or repeat(()), strict=False)

    def _end_measured_steps(self) -> None:
        """Receive and check all steps' summaries, between two steps. All ranks call it."""
        self._receive_summaries(before=self.position.number)
        self._check_replicas(before=self.position.number)
        for extension in self._extensions:
            extension.interrupt()

    def _check_replicas(self, *, before: int) -> None:
        """Stop the run if the ranks differ by the summaries of steps below `before`.

        All ranks call it at the same boundary, because they then compare more.
        """
        while self._unobeyed and self._unobeyed[0].step < before:
            summary = self._unobeyed.popleft()
            for extension, row in self._rows(summary):
                extension.act(summary, row)
            stepped = self._stepped.pop(summary.step, False)
            if summary.same_outcome and not summary.checked and not summary.check_interval:
                continue
            try:
                self._check.require_equal_replicas(summary, stepped=stepped)
            except (ConfigError, ReplicasDiffer):
                self._checkpoints.discard()
                raise

    def settle(self) -> Position:
        """Settle, and receive all summaries, so that the position has all sums."""
        with self.run.timeline.span(SETTLE):
            self._replica.synchronize()
        self._receive_summaries(before=self.position.number)
        return self.position

    def _end_epoch(self) -> None:
        self._end_measured_steps()
        for extension in self._extensions:
            extension.end_epoch()

    def _stop(self) -> None:
        self._end_epoch()
        self.save()
        self.finish(stopped=True)
        raise Stop

    def _record_published(self, writer: CheckpointWriter, *, in_step: bool = False) -> None:
        while True:
            try:
                step, path = writer.published.get_nowait()
            except Empty:  # another thread may have taken the last one
                return
            self._steps_alike = 0
            try:
                self.run.recorder.event(
                    "checkpoint",
                    generation=self.generation,
                    step=step,
                    path=path.name,
                    in_step=in_step,
                )
            except CommError:  # recorded in the next generation, if this process is in it
                writer.published.put((step, path))
                raise

    def _seed_torch(self, purpose: int, number: int) -> int:
        """Seed torch's streams; return the seed: a function of (seed, purpose, step, rank, stage).

        Tensor ranks, which compute the same layers, have the same one.
        """
        context = self.run.context
        base = splitmix.base(self._seed, purpose, number)
        if context.stage:
            base = splitmix.base(base, context.stage)
        word = splitmix.word(base, context.along("data").rank)
        torch.default_generator.manual_seed(word)  # torch.manual_seed takes 0.5 ms
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(word)
        return word


def _seed_python(word: int) -> None:
    """Seed the streams of Python and numpy, which takes 5 microseconds."""
    random.seed(word)
    np.random.seed(word % 2**32)
