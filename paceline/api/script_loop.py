"""Loop of a script: its steps and epochs, and what may be called where.

    for epoch in …:
        for x, y in loader:             an epoch begins; each batch queues its slice
            with world.step(): …        a step trains the waiting slices
                                        the epoch's steps end with the loader's iteration

An epoch ends when the next one begins.

In an interactive interpreter an interrupt ends the loop after the step. The world stays open, and
the loader's next iteration continues the epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple, Self

from torch import Tensor
from torch.optim import Optimizer

from paceline.api.argument_names import errors_name_arguments, print_message_for_scripts
from paceline.api.meters import Meters
from paceline.api.rollback import Outcome, Place, Rollback
from paceline.api.sample_position import SamplePosition
from paceline.api.script_models import ScriptModels
from paceline.api.world_end import WorldEnd
from paceline.comm.communicator import gather_counts, require_same_call
from paceline.data.batch_slice import BatchSlice
from paceline.errors import CommError, ConfigError, PacelineError, many
from paceline.replica.group import AnyReplica
from paceline.replica.live_hooks import patch
from paceline.replica.replica import Replica
from paceline.run.last_comparison import evaluated_apart
from paceline.run.small_slices import SmallSlices
from paceline.run.steps import Steps, Stop
from paceline.session.session import Session
from paceline.session.training import Training

_NEXT_EPOCH = "the begin of the loader's epoch"
_EPOCH_END = "the end of the loader's epoch"
ALIKE = (
    "Iterate over the loader on all ranks alike: skip a batch, or leave the loop, by what is the "
    "same on all, such as a world.total(). To look at a batch on one rank, read the data set."
)
"""What to do where ranks iterate differently over a training loader."""


class ScriptStep:
    """Block of a step in a script's loop; `World.step` makes it.

    Args:
        loop: the loop.
        samples, weight: as of `World.step`.

    Attributes:
        done: whether the step was made. If a peer is lost, its block ends early, and the loader
            yields the batch again.
    """

    def __init__(self, loop: ScriptLoop, samples: int | None, weight: float | None) -> None:
        self._loop = loop
        self._samples = samples
        self._weight = weight
        self._begun: _BegunStep | None = None
        self.done = False

    def __enter__(self) -> Self:
        self._begun = self._loop.begin_step(self._samples, self._weight)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> bool:
        lost = self._loop.end_step(self._begun, error)
        self.done = error is None and lost is None
        return lost is not None


class _BegunStep(NamedTuple):
    """What the end of a step needs of its begin."""

    batch_slice: BatchSlice
    earlier: Sequence[BatchSlice]  # trained by this step, too
    sums: Tensor
    small: AbstractContextManager[None]  # the watch for small slices


class ScriptLoop:
    """Loop of a script, which makes the steps of its models.

    Args:
        session: makes the steps, whose events its run's recorder receives.
        position: the run's position.

    Attributes:
        loaders: the number of loaders that were made.
        rollback: what a lost peer means to the loop.
        meters: what the script's meters have added up.
        evaluated: how many loaders of evaluations this rank has iterated to the end alone.
    """

    def __init__(
        self,
        session: Session,
        models: ScriptModels,
        position: SamplePosition,
        end: WorldEnd,
    ) -> None:
        self._session = session
        self._run = session.run
        self._models = models
        self._position = position
        self._end = end
        self.rollback = Rollback(session, position, end)
        self.loaders = 0
        self.evaluated = 0
        self.meters = Meters(session.device)
        self._reported_apart = False  # that some ranks have evaluated alone
        self._reported_written = False  # that weights were written between two steps
        self._small = SmallSlices(
            session.run,
            position.position,
            (
                "pass drop_last=True or another batch_size to paceline.loader()",
                "sync_bn=True to paceline.parallelize()",
            ),
        )
        self._repeats = False  # the active step trains the batch of the last one too
        self._requested_at = (-1, -1)  # the generation and steps done when a save was requested
        self._run.context.spares = True

    @property
    def steps(self) -> Steps | None:
        """The steps of the models; None: there is no model yet."""
        return self._session.steps

    @property
    def replica(self) -> AnyReplica | None:
        """The model's replica, or those of several as one; None: there is no model yet."""
        return self._models.replica

    @property
    def begun(self) -> bool:
        """Whether this process has begun its first step."""
        return self._models.begun

    def use(self, training: Training) -> None:
        """Watch the optimizers and replicas of the models that are bound."""
        for pair, replica in zip(training.pairs, training.replicas, strict=True):
            self._session.bound.callback(self._refuse_outside(pair.optimizer, replica))
            replica.peer_loss_handler = self

    def _fix_meters(self, steps: Steps) -> None:
        """Let steps sum the meters that there are, from the first one on."""
        self._position.use_sums(self.meters.names)
        self.meters.begin(steps)

    def _refuse_outside(self, optimizer: Optimizer, replica: Replica) -> Callable[[], None]:
        """Refuse updates without an exchange before them; return what undoes that."""
        step = optimizer.step

        def guarded(_: object, *args: Any, **kwargs: Any) -> Any:
            self._require_no_loss()
            if replica.ended:
                raise ConfigError(
                    "optimizer.step() was called outside a step, or twice in one step, so there "
                    "are no exchanged gradients: call it once in each `with world.step():` block."
                )
            return step(*args, **kwargs)

        return patch(optimizer, "step", guarded)

    @property
    def in_step(self) -> bool:
        """Whether a step is active."""
        return self._models.in_step

    @property
    def collects(self) -> bool:
        """Whether what meters get now is of a step that ends later."""
        return (self._models.in_step and not self._repeats) or bool(self._position.waiting)

    @property
    def exchanging(self) -> bool:
        """Whether a step is active whose gradient exchange isn't complete."""
        return self._models.in_step and self.replica is not None and self.replica.exchanging

    @property
    def step_number(self) -> int:
        """The number of the active step, or of the last one; 0 before the first one."""
        return max(0, self._position.position.number - (self._repeats or not self._models.in_step))

    def step(self, samples: int | None, weight: float | None) -> AbstractContextManager[ScriptStep]:
        """Make a step; as `World.step`."""
        step = ScriptStep(self, samples, weight)
        return self._interruptible(step) if self._end.interactive else step

    @contextmanager
    def _interruptible(self, step: ScriptStep) -> Iterator[ScriptStep]:
        with self._end.saved_if_interrupted(self.save_interrupted), step:
            yield step

    def begin_step(self, samples: int | None, weight: float | None) -> _BegunStep | None:
        """Begin a step, which `end_step` ends.

        Returns:
            what that needs; None where a peer is lost here, or was in an earlier step of the same
            batch: then the step's block runs on a plain model.

        Raises:
            PacelineError, SystemExit, KeyboardInterrupt: as `WorldEnd.leave`.
        """
        if self._position.several and self.rollback.error is not None:
            return None
        try:
            steps = self.require_between_steps("world.step()")
        except PacelineError as error:
            self._end.leave(error)
        try:
            return self._begin_step(steps, samples, weight)
        except BaseException as error:
            if self._leave_step(error) is None:
                raise
            self._models.in_step = True  # its block still runs
            return None

    def _begin_step(self, steps: Steps, samples: int | None, weight: float | None) -> _BegunStep:
        self._repeats = self._position.repeats
        if not self._repeats:
            self._save_requested(steps)
        batch_slice, earlier = self._position.next_slice(samples, weight)
        self._fix_meters(steps)
        if not self.begun:
            self._models.begin()
        self._models.in_step = True
        self._run.context.spares = False
        self._models.failed = True
        own = batch_slice.computed
        sums = steps.begin(batch_slice, further=self._repeats)
        small = self._small.in_step(self._models.models, self._position.order, own.stop - own.start)
        small.__enter__()
        return _BegunStep(batch_slice, earlier, sums, small)

    def end_step(self, step: _BegunStep | None, error: BaseException | None) -> CommError | None:
        """End a step; return the loss that has ended it early, if there was one.

        Args:
            step: what `begin_step` has returned.
            error: what has ended the step's block; None: the block is complete.

        Raises:
            PacelineError, SystemExit, KeyboardInterrupt: as `WorldEnd.leave`.
        """
        ended = error
        try:
            if step is not None:
                ended = self._end_step(step, error)
        except BaseException as raised:
            ended = raised
        self._models.in_step = False
        self._run.context.spares = True
        lost = None if ended is None else self._leave_step(ended)
        if ended is not error and lost is None:
            assert ended is not None
            raise ended
        return lost

    def _end_step(self, step: _BegunStep, error: BaseException | None) -> BaseException | None:
        """End the step under way; return its block's error, or that of a loss inside."""
        assert self.steps is not None
        error = error or self.rollback.error
        if error is not None:
            step.small.__exit__(type(error), error, error.__traceback__)
            return error
        step.small.__exit__(None, None, None)
        if not self._repeats:
            self.meters.take(step.sums)
        self.steps.end(step.sums)
        self._models.failed = False
        self._record(step.earlier, self.steps.generation)
        self._position.mark_trained(None if self._position.order is None else step.batch_slice)
        self._report_written()
        return None

    def _leave_step(self, error: BaseException) -> CommError | None:
        """Leave a step that an error has ended; return the loss where the step is made again.

        Raises:
            PacelineError, SystemExit, KeyboardInterrupt: as `WorldEnd.leave`.
        """
        self._models.in_step = False
        if self.steps is not None:
            self.steps.abandon()
        if isinstance(error, CommError):
            with self._end.exit_on_stop():
                self.rollback.lose(error, in_step=True)
            self._models.failed = False  # the loader yields the batch again
            return error
        if isinstance(error, PacelineError | Stop):
            self._end.leave(error)
        return None

    def _report_written(self) -> None:
        """Report once that weights were written between two steps of a run that averages them."""
        rounds = None if self.replica is None else self.replica.rounds
        written = rounds is not None and rounds.written
        if written and not self._reported_written and self._run.leads:
            print_message_for_scripts(
                "the model's weights were written between two steps, other than by "
                'load_state_dict(): with sync="average", such a change is merged as if it were '
                "trained. Load weights by load_state_dict(), and change weights as a part of "
                "training inside world.step()."
            )
        self._reported_written |= written

    def save(self, steps: Steps) -> None:
        """Save a checkpoint: in a loop over the loader, where the next step begins or it ends.

        There the script may still change what the file has, by a scheduler's step, say. A run that
        went on from a file without that change wouldn't repeat it.

        Raises:
            CommError: a peer is lost or silent.
            CheckpointError: an earlier checkpoint couldn't be written.
        """
        self._requested_at = self._present
        if not self._position.iterating:
            self._save_requested(steps)

    def _save_requested(self, steps: Steps) -> None:
        """Save what is requested; after a loss nothing is, and ranks may differ in what was."""
        if self._requested_at == self._present:
            self._requested_at = (-1, -1)
            steps.save(together=False)

    @property
    def _present(self) -> tuple[int, int]:
        return self._run.context.world.generation.number, self._position.position.number

    def begin_epoch(self) -> int:
        """End the epoch of the loader's last iteration; return the first step of the next one.

        Where a peer is lost here, or was since the epoch's last step, nothing is undone, because
        what the script has done since isn't repeated.
        """
        self._end.require_open("the loader")
        with self._run.context.activities.call(_NEXT_EPOCH, remedy=ALIKE):
            return self._begin_epoch()

    def _begin_epoch(self) -> int:
        if self._position.unfinished:
            self._models.discard_batches()
        self._position.waiting.clear()  # slices of an iteration that was left early
        another = self._position.next_is_another
        if self.steps is not None:
            self._fix_meters(self.steps)
        while self.steps is not None and self.rollback.reach(Place.NEXT_EPOCH):
            try:
                with errors_name_arguments():
                    self._require_all_ranks(_NEXT_EPOCH)
                    if another and self._position.position.step > 0:
                        self.steps.end_epoch()
                    self._position.begin_iteration()
                    self.steps.take_snapshot()
                    self._compare_evaluations()
                break
            except CommError as error:
                if not self.rollback.possible:
                    raise
                self.rollback.require_here(error)
        if not self._position.iterating:
            self._position.begin_iteration()
        return self.rollback.continue_steps()

    @property
    def min_slice(self) -> int:
        """The smallest number of samples of a rank's slice that isn't empty."""
        return self._small.min_slice

    def shares(self, number: int) -> Sequence[int] | None:
        """Return the shares of the global batch of a step; None: equal ones.

        Batches whose gradients accumulate have the same.
        """
        speeds = self._session.speeds
        waiting = self._position.waiting
        first = waiting[0].number if waiting else number
        return None if speeds is None else speeds.shares(first)

    def present_shares(self) -> Sequence[int] | None:
        """Return the shares by which an evaluation's batches are divided; None: equal ones."""
        speeds = self._session.speeds
        return None if speeds is None else speeds.present_shares()

    def queue_slice(self, batch_slice: BatchSlice, found: int) -> None:
        """Queue a slice for the next step, which may train later ones too.

        Args:
            found: the number of samples that its batch has after collation.
        """
        if not self._position.waiting:
            self.meters.clear()  # of a step that was not made
        if batch_slice.count > found:
            batch_slice = replace(batch_slice, skipped=batch_slice.count - found)
        self._position.waiting.append(batch_slice)
        if self.steps is not None and self.replica is not None:
            self.steps.seed(batch_slice.number)
            self.replica.begin_batch()

    def end_steps(self) -> int | None:
        """End an epoch's steps; stop here where a signal requested it.

        Returns:
            the step from which the next generation continues, where a peer is lost.
        """
        self._position.require_all_trained()
        if self.steps is None:
            return None
        with self._run.context.activities.call(_EPOCH_END, remedy=ALIKE):
            return self._end_steps(self.steps)

    def _require_all_ranks(self, place: str) -> None:
        """Require that all ranks have come to a place between two epochs; collective.

        What follows there are sums, which the transport doesn't tell from those of a step.
        """
        communicator = self._run.context.group("all", "steps")
        if communicator.world_size > 1:
            require_same_call(communicator, place, "", f"{place}, which all ranks must reach")

    def _compare_evaluations(self) -> None:
        """Report that some ranks have evaluated alone, each its own part; collective."""
        communicator = self._run.context.group("all", "steps")
        if self.rollback.entered or self._reported_apart or communicator.world_size == 1:
            return  # after a loss ranks may differ in what they had begun
        counts = gather_counts(communicator, self.evaluated, "the ranks' numbers of evaluations")
        note = evaluated_apart(counts)
        self._reported_apart = bool(note)
        if note and communicator.rank == 0:
            print_message_for_scripts(note)

    def _end_steps(self, steps: Steps) -> int | None:
        done = self._position.position.number
        with self._end.exit_on_stop():
            while self.rollback.reach(Place.EPOCH_END):
                try:
                    self._require_all_ranks(_EPOCH_END)
                    self._save_requested(steps)
                    steps.end_steps()
                    if self.rollback.possible:
                        steps.take_snapshot()
                    break
                except CommError as error:
                    self.rollback.lose(error)
                    self.rollback.go_back()
                    if self._position.position.number != done:
                        return self.rollback.continue_steps()
        return None

    def begin_evaluation(self, call: str) -> tuple[int | None, bool]:
        """Let an evaluation begin, during which the ranks may change.

        Returns:
            the place of its end, and whether this rank begins with the others; it doesn't where
            they have begun in an earlier generation. Without a place, a peer is lost, and the loop
            goes back to an earlier step, from which it comes here again.

        Raises:
            ConfigError: a step is active, or there is no model.
        """
        lost = self.rollback.error
        if lost is not None and not self.rollback.enter_here(lost):
            return None, True
        steps = self.require_between_steps(call)
        place = self.rollback.next_evaluation()
        while self.rollback.reach(place):
            try:
                communicator = self._run.context.group("all", "steps")
                require_same_call(communicator, call, "", f"{call}, which all ranks must call")
                steps.take_snapshot()
                return place + 1, True
            except CommError as error:
                if not self.rollback.enter_here(error):
                    return None, True
        return place + 1, False

    def call_on_all_ranks(self, call: str, make: Callable[[], Tensor], own: Tensor) -> Tensor:
        """Make a call of all ranks between two steps, made again where a peer is lost in it.

        Args:
            make: makes it, in the present generation; collective.
            own: what it is where the loop goes back to an earlier step, and makes it again.

        Returns:
            what `make` returned here, or on another rank.

        Raises:
            CommError: a peer is lost, and the others can't continue.
        """
        rollback = self.rollback
        if self._models.in_step or not rollback.possible:
            return make()
        lost: CommError | None = rollback.error
        place = 0
        while True:
            if lost is not None:
                if not rollback.enter_here(lost):
                    return own
                if self._run.leads:
                    print_message_for_scripts(
                        f"{call} is made by the remaining ranks: what only the lost rank had, such "
                        "as its own sums, is missing in the result. Sums by world.meter() in "
                        "world.evaluation() are complete."
                    )
                lost = None
            place = place or rollback.next_evaluation()
            if not rollback.reach(place):
                assert rollback.outcome is not None
                assert rollback.outcome.place == place
                return rollback.outcome.value.to(own.device)
            try:
                value = make()
            except CommError as error:
                lost = error
                continue
            rollback.outcome = Outcome(place, value)
            return value

    def finish(self) -> None:
        """Save the state after the last step, unless there is none.

        Where that is incomplete, the newest state in memory is saved. So it is where an error ended
        a cell after the epoch's steps: what follows them in the epoch is repeated. The model gets
        an update that a step has begun before its error, as in plain torch, if all ranks have.

        Where the run survives lost peers, the ranks end together, once the state is on the disk: if
        rank 0 is lost before, the next one writes it.
        """
        if self.steps is None or not self._position.begun:
            return
        if self.broken:
            self.steps.rescue()
            if self.replica is not None:
                with suppress(CommError):  # a peer has gone before its own update
                    self.replica.settle()
            return
        rounds = None if self.replica is None else self.replica.rounds
        if rounds is not None and rounds.unmerged and rounds.last_round == (0, 0) and self.begun:
            self._note_without_merge()
        completed = self.begun and self._position.at_end and not self._position.unfinished
        with errors_name_arguments():
            try:
                self._save_last(self.steps)
                if completed and self.steps.compares:
                    self._compare_evaluations()
                self.steps.finish(together=completed)
            except CommError as error:
                if not completed:
                    raise
                self._finish_without_lost(self.steps, error)

    def _note_without_merge(self) -> None:
        rank, _ = self._run.rank_and_size()
        if rank == 0:
            steps = many(self._position.position.number, "step")
            print_message_for_scripts(
                f"the world closes after {steps}, before the workers' first merge, so the model's "
                "state dict has the weights of the start: pass a smaller every=, or call "
                "world.merge() after the last step."
            )

    def _save_last(self, steps: Steps) -> None:
        if self._position.at_end and not self._position.unfinished:
            steps.end_epoch()
        elif self._position.at_end and not self._position.left_early:
            steps.rescue()
        else:
            steps.save()

    def _finish_without_lost(self, steps: Steps, error: CommError) -> None:
        """Finish in a later generation, if that has the state after the last step.

        Raises:
            CommError: it doesn't: the same command resumes the run, and repeats its last steps.
        """
        while True:
            self.rollback.require_here(error)
            try:
                if self.rollback.reach(Place.NEXT_EPOCH):
                    self._save_last(steps)
                return steps.finish(together=True)
            except CommError as another:
                error = another

    @property
    def parameters_unused(self) -> bool:
        """Whether no parameter was used since the last step; `finish` uses them."""
        return self.replica is not None and self.replica.unused

    def save_interrupted(self) -> int | None:
        """Save the state after an interrupt; return the number of steps in the newest file."""
        if self.steps is None:
            return None
        _, world_size = self._run.rank_and_size()
        if world_size == 1 and not self.broken:
            with errors_name_arguments():
                self.steps.save()
        return self.steps.rescue()

    def require_replica(self, call: str) -> AnyReplica:
        """Return the model's replica; raise ConfigError if there is none or the world is closed."""
        if self._end.closed:
            self._end.require_open(call)
        if self.replica is None:
            raise ConfigError(
                f"{call} was called before paceline.parallelize(model, optimizer, world): call "
                "paceline.parallelize() first."
            )
        self._require_no_loss()
        return self.replica

    def require_steps(self, call: str) -> Steps:
        """Return the model's steps; raise ConfigError if there is none or the world is closed."""
        self.require_replica(call)
        assert self.steps is not None
        return self.steps

    def require_between_steps(self, call: str) -> Steps:
        """Return the model's steps; raise ConfigError if one is active, or none can follow."""
        steps = self.require_steps(call)
        if self._models.in_step:
            raise ConfigError(f"{call} was called inside a step: call it between steps.")
        if self.broken:
            raise ConfigError(
                f"{call} was called after an error inside a step: close() the world and join "
                "again; a run with a folder resumes from its last checkpoint."
            )
        return steps

    def lose_between_steps(self, error: CommError) -> None:
        """Let what follows a step in the script go on after a loss, until the next batch.

        Raises:
            CommError: the error, where the run can't continue.
        """
        if not self.rollback.possible:
            raise error
        self.rollback.lose(error)

    def _require_no_loss(self) -> None:
        """Raise the error of a lost peer, if the loader hasn't gone back since."""
        if self.rollback.error is not None:
            raise self.rollback.error

    @property
    def broken(self) -> bool:
        """Whether the loop has ended in the middle of a step, or was stopped."""
        return self._models.failed or self._end.stopped

    def _record(self, earlier: Sequence[BatchSlice], generation: int) -> None:
        """Record the slices that a step trained besides its own."""
        for one in earlier:
            self._run.recorder.event(
                "step",
                generation=generation,
                step=one.number,
                epoch=one.epoch,
                first=one.first,
                last=one.last,
                cuts=one.cuts,
                skipped=one.skipped,
            )
