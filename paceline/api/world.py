"""`World`: one process among its peers, the models that they train, and their steps.

    with world.step():                   boundary: save what is due, stop where it was requested
        loss = criterion(model(x), y)
        loss.backward()                  the gradient exchange begins
        optimizer.step()                 the next forward installs the new parameters

An epoch ends when the next one begins. What a script does between them, such as a scheduler's step
or an evaluation, belongs to the earlier epoch and is repeated if the run stops in the middle of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from paceline.algorithms.synchronizer import Weights
from paceline.api.argument_names import errors_name_arguments, print_message_for_scripts
from paceline.api.cell_errors import CellErrors
from paceline.api.meter import Meter
from paceline.api.sample_position import SamplePosition
from paceline.api.script_loop import ScriptLoop, ScriptStep
from paceline.api.script_models import ScriptModels
from paceline.api.script_process import ScriptProcess
from paceline.api.world_end import WorldEnd
from paceline.comm.communicator import require_same_call, total
from paceline.errors import CommError, ConfigError, ReplicasDiffer
from paceline.replica.checksums import code_of
from paceline.run.last_comparison import LastState, post_and_compare
from paceline.session.session import Session
from paceline.state.stateful import Restorable


class World:
    """World of the processes that train models together, from the view of one rank.

    `paceline.join` makes it. Used as a context manager, the world is closed at the end of the
    block; otherwise, at the end of the script. In a notebook it stays open until the next world.
    """

    def __init__(self, process: ScriptProcess, session: Session) -> None:
        self._process = process
        self._session = session
        self._run = session.run
        errors = CellErrors(interactive=process.interactive_signals.enabled)
        self._position = SamplePosition(session.position, session.run, errors)
        self._models = ScriptModels(session, self._position)
        self._end = WorldEnd(process, session, self._models)
        self._loop = ScriptLoop(session, self._models, self._position, self._end)
        self._end.begin(self)

    @property
    def rank(self) -> int:
        """This process's rank, 0 to world_size - 1."""
        return self._run.context.world.rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self._run.context.world.size

    @property
    def local_rank(self) -> int:
        """This process's rank on its machine, 0 to local_world_size - 1."""
        return self._run.context.world.local_rank

    @property
    def local_world_size(self) -> int:
        """The number of processes on this machine."""
        return self._run.context.world.local_world_size

    @property
    def mesh(self) -> Mapping[str, int]:
        """The number of processes along each axis: "data", the replicas; "stage"; "tensor"."""
        return self._run.context.mesh.lengths

    def coordinate(self, axis: str) -> int:
        """Return this process's place along an axis of the mesh, from 0: its stage, say.

        Processes that differ in "stage" or "tensor" alone share one replica of the model; the
        loader gives them the same samples. After a loss, "data" is counted anew.

        Raises:
            ConfigError: the mesh has no such axis.
        """
        if axis not in self.mesh:
            raise ConfigError(
                f"world.coordinate({axis!r}) was called, but the axes are {', '.join(self.mesh)}."
            )
        return self._run.context.along(axis).rank

    @property
    def device(self) -> torch.device:
        """The device on which this process computes."""
        return self._session.device

    @property
    def generation(self) -> int:
        """The number of this generation of the run's ranks, over all starts of the run, from 0."""
        return self._run.context.world.generation.number

    @property
    def epoch(self) -> int:
        """The active epoch, or the one that the loader's next iteration begins."""
        return self._position.epoch

    @property
    def steps(self) -> int:
        """The number of steps of the run, those of earlier starts included.

        A step that trains several batches of the loader counts as many.
        """
        return self._position.position.number

    @property
    def staleness(self) -> dict[int, int]:
        """How often each staleness occurred: reads of buckets, by the versions they were behind.

        Of asynchronous workers: gradients of buckets, by the updates they were behind, up to the
        last synchronization of all ranks, such as an epoch's end.

        Those of this rank, since the start, or the last loss of a member or change of what is
        trained; {} without parameter servers, or with `staleness` 0.
        """
        replica = self._loop.replica
        return {} if replica is None else dict(sorted(replica.stale_reads.items()))

    def step(
        self, samples: int | None = None, *, weight: float | None = None
    ) -> AbstractContextManager[ScriptStep]:
        """Make a step on all ranks; forward, backward and `optimizer.step()` go inside the block.

        The gradient of the step is the sum of the ranks' gradients, each weighted by its rank's
        part of the global batch. The loader's batch defines that part. Without a loader of
        Paceline all ranks have the same weight. `samples` and `weight` define other weights.
        Give each on all ranks or on none.

        Args:
            samples: the number of samples of this rank's batch, of which its loss is the mean: what
                the ledger counts. Of a loader's batch, samples that are missing count as skipped.
                A rank with 0 needs no forward and backward; if the loop changes gradients, all
                ranks call `reduce()` first. With `sync_bn` a rank with 0 still runs both, on any
                samples, because the layers exchange within them.
            weight: what this rank's loss is a mean over, where that isn't samples: the number of
                tokens that aren't padding, of pixels that aren't masked, or the sum of the class
                weights of the labels. Finite, at least 0. A rank with 0, whose loss may be NaN,
                trains nothing, as with samples=0; its samples don't count in the statistics of
                `sync_bn` either. Of several batches that a step accumulates, it is the sum. With
                sync="average" it is by what the step counts in the merge, and a rank with 0 makes
                no update.

        Yields:
            the step; after the block, its `done` tells whether it was made.

        Raises:
            ConfigError: a call breaks a rule of the exchange; names the remedy.
            CommError: a peer is lost, silent, or has ended.
            CheckpointError: a checkpoint can't be written.
            SystemExit: this process, or another, received a signal to stop; the state is saved.
            KeyboardInterrupt: in a notebook, the cell was interrupted; the step is made, unless it
                takes longer than 1.5 seconds from there.
        """
        return self._loop.step(samples, weight)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients of backward passes inside; a later pass outside exchanges the sum.

        Raises:
            ConfigError: there is no model yet.
        """
        replica = self._loop.require_replica("world.no_sync()")
        return self._loop.rollback.accumulating(replica)

    def reduce(self) -> None:
        """Wait until every `.grad` is the mean over the global batch and may be changed.

        The first use of a gradient after backward does the same. Call this between backward and
        `optimizer.step()` to choose the moment, or before a use by an alias of a gradient.

        Raises:
            ConfigError: no step is active, or a gradient was changed before.
            CommError: a peer is lost or silent.
        """
        replica = self._loop.require_replica("world.reduce()")
        if replica.rounds is not None:
            raise ConfigError(
                'world.reduce() was called, but with sync="average" gradients are local: clip or '
                "unscale them without it."
            )
        replica.reduce()

    def settle(self) -> None:
        """Wait until all parameters are those after the last `optimizer.step()`.

        The model's next forward, `eval()`, `state_dict()` and any use of a parameter do the same.
        Call this to choose the moment, or before a use by an alias (`p.data` of before).

        Where a peer is lost, and the loop continues without it, nothing is waited for any more
        before the next batch.

        Raises:
            ConfigError: there is no model yet.
            CommError: a peer is lost or silent, and the run can't continue.
        """
        if self._loop.rollback.error is not None:
            return
        replica = self._loop.require_replica("world.settle()")
        try:
            replica.settle()
        except CommError as error:
            if self._loop.in_step:
                raise
            self._loop.lose_between_steps(error)

    def merge(self) -> None:
        """Merge the ranks' weights at once, with sync="average"; otherwise as `settle`. Collective.

        Asynchronous workers get the servers' present parameters, the same on all ranks.

        Afterwards the model has the merged weights, until the next step. Call it after the last
        step: a round may be incomplete then.

        Raises:
            ConfigError: there is no model yet, a step is active, or another rank makes another
                call.
            CommError: a peer is lost or silent, or doesn't call it.
        """
        call = "world.merge()"
        if self._loop.rollback.error is None:
            self._loop.require_between_steps(call)
        replica = self._loop.replica
        assert replica is not None

        def merge() -> Tensor:
            if replica.rounds is not None or not replica.equal_between_steps:
                communicator = self._run.context.group("all", "steps")
                require_same_call(communicator, call, "", f"{call}, which all ranks must call")
            if replica.rounds is None:
                replica.synchronize()
            else:
                replica.settle(Weights.MERGED)
            return torch.empty(0)

        with self._end.explained(call), self._run.context.activities.call(call):
            self._loop.call_on_all_ranks(call, merge, torch.empty(0))

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks, or over replicas of several; collective.

        Args:
            tensor: of the same shape and dtype on all ranks.

        Returns:
            the sum; of integers and bool as int64, as `torch.sum` has it, and of floating-point
            numbers of fewer than 32 bits as float32.

        Raises:
            ConfigError: a step is active whose gradient exchange isn't complete, or another rank's
                tensor has another shape or dtype.
            CommError: a peer is lost, silent, or has ended.
        """
        self._end.require_open("world.total()")
        if not isinstance(tensor, Tensor):
            raise ConfigError(
                f"world.total() got {type(tensor).__name__} {tensor!r}: pass a tensor, such as "
                "torch.tensor(3)."
            )
        if self._loop.exchanging:
            raise ConfigError(
                "world.total() was called inside a step before optimizer.step(), during the "
                "gradient exchange: call it after optimizer.step()."
            )
        values = tensor.detach()
        form = f"{values.dtype} of shape {tuple(values.shape)}"
        if not (values.is_floating_point() or values.is_complex()):
            values = values.long()  # a sum of small integers would wrap
        elif values.is_floating_point() and values.itemsize < torch.float32.itemsize:
            # A sum of bfloat16 has 8 bits, and one of float16 ends at 65,504.
            values = values.float()
        what = "world.total(), which all ranks must call"

        def add_up() -> Tensor:
            communicator = self._run.context.group("data", "steps")
            require_same_call(communicator, "world.total()", form, what)
            return total(communicator, values, what)

        call = "world.total()"
        with self._end.explained(call), self._run.context.activities.call(call):
            return self._loop.call_on_all_ranks(call, add_up, values)

    def meter(self, *names: str) -> Meter:
        """Make a meter: sums over the steps of an epoch, or over an evaluation. All ranks call it.

        Values are added on each rank (`Meter.add`), and read as sums over all ranks (`Meter.sums`).
        A lost rank changes no sum: values of steps are undone with the steps, and what it had to
        evaluate is evaluated by the others.

        Args:
            names: of the sums. Meters of steps are made before the first step.

        Raises:
            ConfigError: there is no name, or one is given twice.
        """
        self._end.require_open("world.meter()")
        if not names or len(set(names)) < len(names):
            raise ConfigError(
                f"world.meter() got the names {', '.join(map(repr, names)) or 'none'}: pass the "
                "names of its sums, each once, such as world.meter('loss', 'samples')."
            )
        return Meter(self._loop.meters, self._loop, names)

    def evaluation(self, loader: object) -> Iterator[Any]:
        """Yield the batches of an evaluation that outlives lost peers. All ranks call it.

        Each sample is yielded once, on one rank, as by the loader itself. Where a peer is lost
        meanwhile, the others continue in the next generation: what it had to evaluate is divided
        among them, and what they have evaluated isn't repeated. So sums that a rank adds up in the
        loop, and `world.total` after it, count each sample once.

        All ranks must iterate to the end, where they wait for each other. Where a loss ends the run
        anyway, it is the loader's own iteration.

        Args:
            loader: `paceline.loader` of a map-style data set, with `train=False`.

        Raises:
            ConfigError: it is another loader, or a step is active.
            CommError: a peer is lost, and the others can't continue from here, or it is silent.
        """
        self._end.require_open("world.evaluation()")
        batches = getattr(loader, "_surviving_batches", None)
        if batches is None:
            raise ConfigError(
                f"world.evaluation() got {type(loader).__name__}: pass a paceline.loader() of a "
                "map-style data set, with train=False; iterate over anything else directly."
            )
        if self._loop.in_step:
            raise ConfigError("world.evaluation() was called inside a step: call it between steps.")
        chosen: Iterator[Any] = batches()
        return chosen

    def track(self, *objects: Restorable, **named: Restorable) -> None:
        """Save the state of more objects in checkpoints; a resumed run restores it at once.

        Args:
            objects: schedulers, scalers, …; in the same order at each start of the run.
            named: the same, under names of your own.

        Raises:
            ConfigError: an object has no state, or the checkpoint has the states of other objects.
        """
        if self._loop.begun:
            raise ConfigError(
                "world.track() was called after the first step: call it before the first step, so "
                "that the state can be restored."
            )
        tracked = self._models.tracked
        tracked.add({**tracked.default_names(objects), **named})
        with errors_name_arguments():
            self._models.restore_optimizers()

    def log(self, **values: float | Tensor) -> None:
        """Show values of this step in the trackers that `paceline.join(tracker=…)` names.

        Rank 0's values are shown, those of other ranks are ignored. Without a tracker, the call has
        no effect.

        Args:
            values: numbers, or tensors of one element, by name.

        Raises:
            ConfigError: a value is neither.
        """
        self._end.require_open("world.log()")
        numbers = {}
        for name, value in values.items():
            try:
                numbers[name] = float(value.detach() if isinstance(value, Tensor) else value)
            except (TypeError, ValueError, RuntimeError) as error:
                raise ConfigError(
                    f"world.log() got {name}={type(value).__name__}: pass a number, or a tensor of "
                    "one element."
                ) from error
        self._run.recorder.event("log", step=self._loop.step_number, values=numbers)

    def checkpoint(self) -> None:
        """Save a checkpoint, in the background. All ranks call it; rank 0 writes.

        Rank 0 alone may call it, unless ranks have state of their own to contribute: with a lossy
        wire, with update="sharded", with sync="average", or with a mesh that divides the model.

        In a loop over the loader the file is made where the next step begins, or where the loop
        ends: it has what the script does until then, such as a scheduler's step. Elsewhere it is
        made at once: call it where the next step could begin, because a resumed run doesn't repeat
        what comes before. Where a peer is lost, and the loop continues without it, nothing is
        saved: the loop goes back.

        Raises:
            ConfigError: there is no run folder, a step is active, or another rank makes another
                call.
            CommError: a peer is lost or silent, or doesn't call it although it must, and the run
                can't continue.
            CheckpointError: an earlier checkpoint couldn't be written.
        """
        call = "world.checkpoint()"
        if self._session.folder is None:
            raise ConfigError(f"{call} needs a run folder: pass run=… to paceline.join().")
        if self._loop.rollback.error is not None:
            return
        steps = self._loop.require_between_steps(call)
        replica = self._loop.replica
        with self._end.explained(call):
            try:
                in_parts = self._run.context.mesh.divided
                if replica is not None and (replica.stateful or in_parts):
                    what = f"{call}, which all ranks must call where ranks have state of their own"
                    context = self._run.context
                    with context.activities.call(call):
                        require_same_call(context.group("data", "steps"), call, "", what)
                self._loop.save(steps)
            except CommError as error:
                self._loop.lose_between_steps(error)

    def close(self) -> None:
        """End the world after its last step; save what isn't saved yet.

        Without a run folder, the last rank that closes its world compares the ranks' parameters,
        unless a script has written them since the last step. Where scripts may have written them
        unseen, through `p.data`, say, a difference is a warning.

        Raises:
            CommError: a peer is lost or silent.
            CheckpointError: the last checkpoint can't be written.
            ReplicasDiffer: the parameters differ between ranks; on the last rank.
        """
        if self._end.closed:
            return
        with self._run.context.activities.call("world.close()", checked=False):
            self._close()

    def _close(self) -> None:
        differ: ReplicasDiffer | None = None
        used = not self._loop.parameters_unused  # before `finish`, which uses them
        try:
            self._loop.finish()
            present = self._run.context.world.generation
            self._session.leave()
            lasted = present.token == self._process.joined.group.generation.token
            # Otherwise the status explains the end.
            if lasted and not self._process.exit_handler.requested_status:
                self._process.post_end(self.steps)  # `drain` may wait as long as a peer that asks
                with suppress(CommError):  # nothing to compare where a peer has gone
                    differ = self._compare_last(used=used)
                self._note_unmerged()
            if self._loop.replica is not None:
                # A peer that still makes a call of all ranks learns of the end.
                self._run.context.group("all", "steps").close()
                self._loop.replica.drain()
            if differ is not None:
                raise differ
        except BaseException:
            self._fail(*sys.exc_info())
            raise
        self._end.release(None, None, None)
        self._process.exit_handler.restore_hooks()
        self._process.joined.process_end.close()

    def _note_unmerged(self) -> None:
        """Print a note on rank 0 if the merged weights lack the last steps."""
        rounds = None if self._loop.replica is None else self._loop.replica.rounds
        stopped = self._session.signals.status != 0
        if rounds is not None and rounds.unmerged and not stopped and self.rank == 0:
            print_message_for_scripts(
                "the merged weights lack the steps since the last merge: call world.merge() after "
                "the last step."
            )

    def _compare_last(self, *, used: bool) -> ReplicasDiffer | None:
        """Post the checksums of the last state, if they are due; as the last rank, compare them.

        It waits for the exchange of the last step, but not for other ranks to close.

        Args:
            used: whether the script may have used parameters since the last step.

        Raises:
            CommError: a peer was lost, or silent, in that exchange.
        """
        loop = self._loop
        if loop.steps is None or not loop.begun or loop.broken:
            return None
        checksums = loop.steps.last_checksums()
        if checksums is None:
            return None
        joined = self._process.joined
        evaluated = 0 if loop.rollback.entered else loop.evaluated
        own = LastState(steps=self.steps, code=code_of(checksums), used=used, evaluated=evaluated)
        report = print_message_for_scripts
        group = self._run.context.along("data")
        return post_and_compare(joined.store, group, own, checksums, report)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None or issubclass(kind, SystemExit):
            self._process.exit_handler.post_exit_status()
            self.close()
        else:
            if self._end.interactive and self._loop.steps is not None:
                self._end.print_saved(self._loop.steps.rescue())
            self._fail(kind, error, traceback)

    def _fail(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Save the newest state in memory, while it can be recorded, and close all resources."""
        self._end.rescue(error)
        self._end.release(kind, error, traceback)


def require_world(world: object, call: str) -> None:
    """Require that a call got the world that `paceline.join()` has returned.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(world, World):
        raise ConfigError(
            f"{call} got {type(world).__name__} as world=: pass the world that paceline.join() "
            "returns."
        )
