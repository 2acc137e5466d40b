"""`World`: one process among its peers, the one model that they train, and their steps.

    with world.step():                   boundary: save what is due, stop where it was requested
        loss = criterion(model(x), y)
        loss.backward()                  the gradient exchange begins
        optimizer.step()                 the next forward installs the new parameters

An epoch ends when the next one begins. What a script does between them, such as a scheduler's step
or an evaluation, belongs to the earlier epoch and is repeated if the run stops in the middle of it.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.api.argument_names import (
    as_argument,
    errors_name_arguments,
    print_message_for_scripts,
)
from paceline.api.sample_position import SamplePosition
from paceline.api.session import Session
from paceline.api.tracked import Tracked
from paceline.cluster.supervision.supervisor import print_message, saved_sentence
from paceline.comm.communicator import TEXT_BYTES, gather_texts, total
from paceline.data.batch_slice import BatchSlice
from paceline.data.order import Order
from paceline.errors import CommError, ConfigError, PacelineError
from paceline.replica.hooks import patch
from paceline.replica.replica import Replica
from paceline.replica.state_copier import StateObjects
from paceline.run.checkpoint_schedule import SavePolicy
from paceline.run.run import Run
from paceline.run.step_snapshots import StepSnapshots
from paceline.run.steps import NextGeneration, Steps, Stop
from paceline.state.checkpoint_files import Checkpoints
from paceline.state.checkpoint_writer import CheckpointWriter
from paceline.state.stateful import Restorable
from paceline.wiring import Start

_TERMINATED = 143  # the status where another process received the signal


@dataclass
class ActiveStep:
    """Step of a script's loop.

    Attributes:
        done: whether the step was made. If a peer is lost, its block ends early, and the loader
            yields the batch again.
    """

    done: bool = False


class World:
    """World of the processes that train one model together, from the view of one rank.

    `paceline.join` makes it. Used as a context manager, the world is closed at the end of the
    block; otherwise, at the end of the script.
    """

    def __init__(self, session: Session, run: Run, start: Start) -> None:
        self._session, self._run = session, run
        self._start = start  # without the checkpoint from the first step on
        self._tracked = Tracked(None if start.state is None else start.state.get("tracked", {}))
        self._position = SamplePosition(start.position, run, session.device)
        start.restore({"course": self._position})
        self._saved_objects: dict[str, Any] = {}  # "model" and "optimizer", once there is a model
        self._steps: Steps | None = None
        self._replica: Replica | None = None
        self._loaders = 0
        self._begun = False  # this process has begun its first step
        self._in_step = False  # a step is active
        self._lost: CommError | None = None  # until the loader goes back to a snapshot
        self._next_generation: NextGeneration | None = None
        self._broken = False  # an error or a stop ended the last step
        self._closed = False
        session.exit_handler.rescue = self._rescue
        if session.run is not None and threading.current_thread() is threading.main_thread():
            session.resources.enter_context(session.signals.received(self._rescue))
        atexit.register(self._close_at_exit)

    @property
    def rank(self) -> int:
        """This process's rank, 0 to world_size - 1."""
        return self._run.context.group.rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self._run.context.group.size

    @property
    def local_rank(self) -> int:
        """This process's rank on its machine, 0 to local_world_size - 1."""
        return self._run.context.group.local_rank

    @property
    def local_world_size(self) -> int:
        """The number of processes on this machine."""
        return self._run.context.group.local_world_size

    @property
    def device(self) -> torch.device:
        """The device on which this process computes."""
        return self._session.device

    @property
    def generation(self) -> int:
        """The number of this generation of the run's ranks, over all starts of the run, from 0."""
        return self._start.generation if self._steps is None else self._steps.generation

    @property
    def epoch(self) -> int:
        """The active epoch, or the one that the loader's next iteration begins."""
        return self._position.epoch

    @property
    def steps(self) -> int:
        """The number of steps of the run, those of earlier starts included."""
        return self._position.position.number

    @contextmanager
    def step(self, samples: int | None = None) -> Iterator[ActiveStep]:
        """Make a step on all ranks; forward, backward and `optimizer.step()` go inside the block.

        The gradient of the step is the sum of the ranks' gradients, each weighted by its rank's
        part of the global batch. The loader's batch defines that part. Without a loader of
        Paceline all ranks have the same weight, or the weights that `samples` defines.

        Args:
            samples: the number of samples of which this rank's loss is the mean. Give it on all
                ranks or on none. A rank with 0 needs no forward and backward. With `sync_bn` it
                still runs both, on any samples, because the layers exchange within them.

        Yields:
            the step; after the block, its `done` tells whether it was made.

        Raises:
            ConfigError: a call breaks a rule of the exchange; names the remedy.
            CommError: a peer is lost, silent, or has ended.
            CheckpointError: a checkpoint can't be written.
            SystemExit: this process, or another, received a signal to stop; the state is saved.
        """
        steps, step, entered = self._between_steps("world.step()"), ActiveStep(), False
        with self._exit_on_stop():
            try:
                batch_slice, earlier = self._position.next_slice(samples)
                self._begin()
                self._in_step = self._broken = True
                with steps.step(batch_slice):
                    entered = True
                    yield step
            except CommError as error:
                self._lose(error)
                if not entered:
                    with suppress(CommError):  # of the first use of the exchange
                        yield step
                return
            finally:
                self._in_step = False
            self._broken, step.done = False, True
            for one in earlier:
                self._run.recorder.event(
                    "step",
                    generation=self.generation,
                    step=one.number,
                    epoch=one.epoch,
                    first=one.first,
                    last=one.last,
                    cuts=one.cuts,
                    skipped=one.skipped,
                )
            self._position.mark_trained()

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients of backward passes inside; a later pass outside exchanges the sum.

        Raises:
            ConfigError: there is no model yet.
        """
        return self._accumulating(self._require_replica("world.no_sync()"))

    def reduce(self) -> None:
        """Wait until every `.grad` is the mean over the global batch and may be changed.

        Call it between backward and `optimizer.step()`, to clip, unscale or inspect gradients.

        Raises:
            ConfigError: no step is active, or a gradient was changed before.
            CommError: a peer is lost or silent.
        """
        self._require_replica("world.reduce()").reduce()

    def settle(self) -> None:
        """Wait until all parameters are those after the last `optimizer.step()`.

        The model's next forward, `eval()` and `state_dict()` do the same. Call this before other
        reads of the parameters, such as an average of weights.

        Raises:
            ConfigError: there is no model yet.
            CommError: a peer is lost or silent.
        """
        self._require_replica("world.settle()").settle()

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks; collective.

        Args:
            tensor: of the same shape and dtype on all ranks; a bool tensor is counted as int64.

        Raises:
            ConfigError: a step is active whose gradient exchange isn't complete, or another rank's
                tensor has another shape or dtype.
            CommError: a peer is lost, silent, or has ended.
        """
        self._require_open("world.total()")
        if not isinstance(tensor, Tensor):
            raise ConfigError(
                f"world.total() got {type(tensor).__name__} {tensor!r}: pass a tensor, such as "
                "torch.tensor(3)."
            )
        if self._in_step and self._replica is not None and not self._replica.ended:
            raise ConfigError(
                "world.total() was called inside a step before optimizer.step(), during the "
                "gradient exchange: call it after optimizer.step()."
            )
        values = tensor.detach().to(self.device)
        values = values.long() if values.dtype is torch.bool else values
        what = "world.total(), which all ranks must call"
        with self._explained("world.total()"):
            given = f"{values.dtype} of shape {tuple(values.shape)}"[:TEXT_BYTES]
            communicator = self._run.context.communicator
            for rank, other in enumerate(gather_texts(communicator, given, self.device, what)):
                if other != given:
                    raise ConfigError(
                        f"world.total() got {given} on rank {self.rank} and {other} on rank "
                        f"{rank}: pass tensors of the same shape and dtype."
                    )
            return total(communicator, values, what).to(tensor.device)

    def track(self, *objects: Restorable, **named: Restorable) -> None:
        """Save the state of more objects in checkpoints; a resumed run restores it at once.

        Args:
            objects: schedulers, scalers, …; in the same order at each start of the run.
            named: the same, under names of your own.

        Raises:
            ConfigError: an object has no state, or the checkpoint has the states of other objects.
        """
        if self._begun:
            raise ConfigError(
                "world.track() was called after the first step: call it before the first step, so "
                "that the state can be restored."
            )
        self._tracked.add({**self._tracked.default_names(objects), **named})
        if self._saved_objects:
            with errors_name_arguments():  # a new scheduler has reset the optimizer's rates
                self._start.restore({"optimizer": self._saved_objects["optimizer"]})

    def checkpoint(self) -> None:
        """Save a checkpoint now, in the background. All ranks call it; rank 0 writes.

        Rank 0 alone may call it, unless ranks have state of their own to contribute: with a lossy
        wire, or with update="sharded".

        Call it where the next step could begin: a resumed run repeats what comes before that step.

        Raises:
            ConfigError: there is no run folder, or a step is active.
            CommError: a peer is lost or silent.
            CheckpointError: an earlier checkpoint couldn't be written.
        """
        if self._session.run is None:
            raise ConfigError(
                "world.checkpoint() needs a run folder: pass run=… to paceline.join()."
            )
        with errors_name_arguments():
            self._between_steps("world.checkpoint()").save(together=False)

    def close(self) -> None:
        """End the world after its last step; save what isn't saved yet.

        Raises:
            CommError: a peer is lost or silent.
            CheckpointError: the last checkpoint can't be written.
        """
        if self._closed:
            return
        try:
            self._finish()
            if not self._session.exit_handler.requested_status:  # else the status explains the end
                self._session.post_end(self.steps)  # `drain` may wait as long as a peer that asks
            if self._replica is not None:
                self._replica.drain()
        except BaseException:
            self._release(*sys.exc_info())
            raise
        self._release(None, None, None)
        self._session.exit_handler.restore_hooks()
        self._session.joined.process_end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None or issubclass(kind, SystemExit):
            self._session.exit_handler.post_exit_status()
            self.close()
        else:
            self._release(kind, error, traceback)

    def _bind(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        replica: Replica,
        saved_objects: dict[str, Any],
    ) -> None:
        """Make steps of a model from now on; `saved_objects` is what checkpoints save, by name."""
        session = self._session
        session.resources.callback(replica.close)
        session.resources.callback(_refuse_outside(optimizer, replica, lambda: self._lost))
        self._replica, self._saved_objects = replica, saved_objects
        output, writer = session.output, None
        if session.run is not None and self.rank == 0:
            writer = CheckpointWriter(
                Checkpoints(session.run, output.keep_checkpoints),
                constant={"config": session.identity},
                report=print_message,
            )
        objects = StateObjects(
            model=model,
            optimizer=optimizer,
            tracked=self._tracked.objects,
            saved={"course": self._position},
            tracked_entry="tracked",
        )
        snapshots = StepSnapshots(
            self._run,
            replica,
            objects,
            session.device,
            enabled=output.snapshots,
            interval=self._position.position.snapshot_interval,
            limit_mb=output.snapshot_memory_mb,
            report=print_message_for_scripts,
        )
        self._steps = Steps(
            replica,
            self._run,
            writer,
            generation=self.generation,
            seed=session.seed,
            position=self._position.position,
            policy=SavePolicy(steps=output.checkpoint_steps, minutes=output.checkpoint_minutes),
            stopping=lambda: session.signals.status != 0,
            check_sums=lambda number, sums: None,
            value_count=0,
            device=session.device,
            snapshots=snapshots,
            next_generation=self._next_generation,
        )

    def _add_loader(self, order: Order, *, train: bool) -> None:
        """Compare a loader with the other ranks', and use a training loader's order; collective.

        Raises:
            ConfigError: the ranks' loaders differ, or this one doesn't fit the run.
        """
        self._loaders += 1
        facts = {
            "the data set's length": order.size,
            "batch_size": order.batch_size,
            "seed of the loader": order.seed,
            "shuffle": order.shuffle,
            "train": train,
        }
        self._session.require_equal(f"loader {self._loaders}", facts)
        if train:
            self._position.use_order(order)

    def _begin_epoch(self) -> int:
        """End the epoch of the loader's last iteration; return the first step of the next one.

        A lost peer takes the run back to here, not to the earlier epoch: what the script has done
        between them isn't repeated.
        """
        self._require_open("the loader")
        self._position.waiting.clear()  # slices of an iteration that was left early
        if self._position.next_is_another and self._steps is not None:
            with errors_name_arguments():
                self._steps.end_epoch()
        self._position.begun = self._position.iterating = True
        if self._steps is not None:
            with errors_name_arguments():
                self._steps.take_snapshot()
        return self._position.position.step

    def _queue_slice(self, batch_slice: BatchSlice) -> None:
        """Queue a slice for the next step, which may train later ones too."""
        self._position.waiting.append(batch_slice)
        if self._steps is not None:
            self._steps.seed(batch_slice.number)

    def _end_steps(self) -> int | None:
        """End an epoch's steps; stop here where a signal requested it.

        Returns:
            the step from which the next generation continues, where a peer is lost.
        """
        self._position.require_all_trained()
        if self._steps is not None:
            with self._exit_on_stop():
                try:
                    self._steps.end_steps()
                except CommError as error:
                    self._lose(error)
                    return self._go_back(error)
        return None

    @contextmanager
    def _accumulating(self, replica: Replica) -> Iterator[None]:
        try:
            with replica.no_sync():
                yield
        except CommError as error:
            self._lose(error)

    def _lose(self, error: CommError) -> None:
        """Leave a generation that has lost a peer; raise its error where the run can't go on."""
        if self._lost is not None:  # this is what follows from it
            return
        if self._steps is None or self._position.order is None:
            raise error
        self._steps.leave_generation(error)
        self._lost, self._broken = error, False

    def _go_back(self, error: CommError) -> int:
        """Go back to a snapshot, and on in the next generation; return the epoch's next step."""
        assert self._steps is not None
        with self._exit_on_stop():
            self._steps.go_back(error)
        self._lost = None
        self._position.waiting.clear()
        return self._position.position.step

    def _begin(self) -> None:
        """Begin this start's first step."""
        if self._begun:
            return
        self._tracked.begin()
        assert self._replica is not None
        for scaler in self._tracked.scalers:
            self._replica.follow(scaler.get_scale)
        order = self._position.order
        assert self._steps is not None
        self._steps.record_start(
            self._start.origin,
            samples=order and order.samples,
            steps=order and order.steps,
            epochs=None,  # only the script has this number
            batch=order and order.batch_size,
            model=type(self._saved_objects["model"]).__name__,
            device=self.device.type,
        )
        self._begun, self._start = True, replace(self._start, state=None)

    def _finish(self) -> None:
        """Save the state after the last step, unless there is none or it is broken."""
        if self._steps is None or self._broken or not self._position.begun:
            return
        with errors_name_arguments():
            if self._position.at_end:
                self._steps.end_epoch()
            else:
                self._steps.save()
            self._steps.finish()

    def _rescue(self) -> None:
        """Write the newest state in memory to the disk, from any thread."""
        if self._steps is not None:
            self._steps.rescue()

    def _require_open(self, call: str) -> None:
        """Raise ConfigError if the world is closed."""
        if self._closed:
            raise ConfigError(f"{call} was used after world.close(): call paceline.join() again.")

    def _require_replica(self, call: str) -> Replica:
        """Return the model's replica; raise ConfigError if there is none or the world is closed."""
        self._require_open(call)
        if self._replica is None:
            raise ConfigError(
                f"{call} was called before paceline.parallelize(model, optimizer, world): call "
                "paceline.parallelize() first."
            )
        if self._lost is not None:
            raise self._lost
        return self._replica

    def _between_steps(self, call: str) -> Steps:
        self._require_replica(call)
        assert self._steps is not None
        if self._in_step:
            raise ConfigError(f"{call} was called inside a step: call it between steps.")
        if self._broken:
            raise ConfigError(
                f"{call} was called after an error inside a step: close() the world and join "
                "again; a run with a folder resumes from its last checkpoint."
            )
        return self._steps

    @contextmanager
    def _explained(self, operation: str = "the next step") -> Iterator[None]:
        """Name the cause of a lost peer, and options as arguments, in errors that leave the block.

        Args:
            operation: what the peer is missing from.
        """
        try:
            yield
        except PacelineError as error:
            error.name_of = as_argument
            lost = isinstance(error, CommError)
            cause = self._session.ended_peer(self.steps, operation) if lost else None
            if cause is None:
                raise
            raise cause from error

    @contextmanager
    def _exit_on_stop(self) -> Iterator[None]:
        """Exit the script where the block stops the run, as a signal requested."""
        session = self._session
        try:
            with self._explained():
                yield
        except Stop:
            self._broken = True  # the state is saved already
            if session.joined.launcher == "paceline" and session.run and self.rank == 0:
                print_message(saved_sentence(session.run))
            raise SystemExit(session.signals.status or _TERMINATED) from None

    def _release(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close all resources; the exit handler still reports the error, if there is one."""
        if not self._closed:
            self._closed = True
            atexit.unregister(self._close_at_exit)
            self._session.exit_handler.active = False
            self._session.resources.__exit__(kind, error, traceback)

    def _close_at_exit(self) -> None:
        """Close at the end of the script, and report where that fails."""
        if self._session.exit_handler.failed:
            return
        try:
            self._session.exit_handler.post_exit_status()
            self.close()
        except Exception as error:
            self._session.exit_handler.at_exit(error)


def _refuse_outside(
    optimizer: Optimizer, replica: Replica, lost: Callable[[], CommError | None]
) -> Callable[[], None]:
    """Refuse updates without an exchange before them; return what undoes that."""
    step = optimizer.step

    def guarded(_: object, *args: Any, **kwargs: Any) -> Any:
        if (error := lost()) is not None:
            raise error
        if replica.ended:
            raise ConfigError(
                "optimizer.step() was called outside a step, or twice in one step, so there are no "
                "exchanged gradients: call it once in each `with world.step():` block."
            )
        return step(*args, **kwargs)

    return patch(optimizer, "step", guarded)
