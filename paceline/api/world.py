"""`World`: a process's place among its peers, and the steps that they make together.

with world.step():                   a boundary: what is due is saved, who was asked to stops
    loss = criterion(model(x), y)
    loss.backward()                  gradients travel
    optimizer.step()                 is installed by the next forward's layers
"""

from __future__ import annotations

import atexit
import sys
import threading
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from paceline.api.session import Session
from paceline.api.tracked import Trackable
from paceline.api.training import Training
from paceline.comm.communicator import total
from paceline.errors import ConfigError
from paceline.wiring import Start


class World:
    """The processes that train together, as one of them sees them; made by `paceline.join`.

    A context manager: its end is `close`. Without one, the script's end is.
    """

    def __init__(self, session: Session, start: Start) -> None:
        self._session = session
        self._members = session.link.joined.members
        self._training = Training(session, start)
        session.exit_handler.rescue = self._training.rescue
        if session.run is not None and threading.current_thread() is threading.main_thread():
            hear = session.signals.heard(self._training.rescue)
            session.resources.enter_context(hear)
        atexit.register(self._close_at_exit)

    @property
    def rank(self) -> int:
        """This process's number, 0 to world_size - 1."""
        return self._members.rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self._members.world_size

    @property
    def local_rank(self) -> int:
        """This process's number on its machine."""
        return self._members.local_rank

    @property
    def local_world_size(self) -> int:
        """The number of processes on this machine."""
        return self._members.local_world_size

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self._session.link.device

    @property
    def generation(self) -> int:
        """How often the run was started before."""
        return self._training.start.generation

    @property
    def epoch(self) -> int:
        """The epoch in which the run goes on."""
        return self._training.position.epoch

    @property
    def steps(self) -> int:
        """The steps that the run has made, in earlier starts of it too."""
        return self._training.position.position.number

    def step(self, samples: int | None = None) -> AbstractContextManager[None]:
        """Make a step with all other processes; forward, backward and `optimizer.step()` inside.

        The gradients of the ranks are added up, each with its rank's part of the global batch: the
        loader's batch says how many samples that is. In a loop without our loader all ranks count
        the same, or what `samples` says.

        Args:
            samples: how many samples this rank's loss is the mean of; on all ranks or on none.
                With 0 a rank needs no forward and backward; with `sync_bn` it makes both, of any
                samples, as its layers exchange within them.

        Raises:
            ConfigError: a rule of the exchange is broken; names the remedy.
            CommError: a peer was lost, or silent.
            CheckpointError: a checkpoint couldn't be written.
            SystemExit: this process, or another, was asked to stop; the state is saved.
        """
        return self._training.step(samples)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate: gradients of backwards inside the block stay here, for a later one to send.

        Raises:
            ConfigError: there is no model yet.
        """
        return self._training.replica("world.no_sync()").no_sync()

    def reduce(self) -> None:
        """Wait, and make every `.grad` the mean over the global batch; then it may be changed.

        Between backward and `optimizer.step()`: to clip, to unscale, to look.

        Raises:
            ConfigError: no step runs, or a gradient was changed before.
            CommError: a peer was lost, or silent.
        """
        self._training.replica("world.reduce()").reduce()

    def settle(self) -> None:
        """Wait, and make all parameters those after the last `optimizer.step()`.

        The model's next forward, `eval()` and `state_dict()` do so themselves; code that reads
        parameters otherwise (an average of weights) calls this first.

        Raises:
            ConfigError: there is no model yet.
            CommError: a peer was lost, or silent.
        """
        self._training.replica("world.settle()").settle()

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks; collective.

        Args:
            tensor: of one shape and dtype on all ranks; truth values are counted.

        Raises:
            ConfigError: a step runs whose gradients are yet to be sent.
            CommError: a peer was lost, or silent.
        """
        self._training.require_open("world.total()")
        if self._training.exchanging:
            raise ConfigError(
                "world.total() was called in a step before optimizer.step(), while gradients "
                "travel: call it after optimizer.step()."
            )
        values = tensor.detach().to(self.device)
        values = values.long() if values.dtype is torch.bool else values
        return total(self._session.communicator, values, "world.total()").to(tensor.device)

    def track(self, *objects: Trackable, **named: Trackable) -> None:
        """Keep the state of more objects in checkpoints; on resume they get it back at once.

        Args:
            objects: schedulers, scalers, …; in the same order at each start of the run.
            named: the same, with names of one's own.

        Raises:
            ConfigError: an object has no state, or the checkpoint has other objects' states.
        """
        self._training.track(objects, named)

    def checkpoint(self) -> None:
        """Save a checkpoint now, in the background. All ranks call it; rank 0 writes.

        Rank 0 alone may call it, too, unless ranks have state of their own, which each gives: by a
        lossy wire, or with update="sharded".

        Call it where the next step could begin: what comes before that step is made again.

        Raises:
            ConfigError: there is no run to save it to, or a step runs.
            CommError: a peer was lost, or silent.
            CheckpointError: an earlier checkpoint couldn't be written.
        """
        if self._session.run is None:
            raise ConfigError(
                "world.checkpoint() has nowhere to write: give paceline.join() a folder, run=…."
            )
        self._training.save()

    def close(self) -> None:
        """Leave the world, when all steps are done; what isn't saved is.

        Raises:
            CommError: a peer was lost, or silent.
            CheckpointError: the last checkpoint couldn't be written.
        """
        if self._training.closed:
            return
        try:
            self._training.finish()
            self._training.drain()
        except BaseException:
            self._release(*sys.exc_info())
            raise
        self._release(None, None, None)
        self._session.exit_handler.withdraw()
        self._session.link.joined.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None or issubclass(kind, SystemExit):
            self._session.exit_handler.warn()
            self.close()
        else:
            self._release(kind, error, trace)

    def _release(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let go of all that is held; after an error its last word is still to be said."""
        if not self._training.closed:
            self._training.closed = True
            atexit.unregister(self._close_at_exit)
            self._session.exit_handler.standing = False
            self._session.resources.__exit__(kind, error, trace)

    def _close_at_exit(self) -> None:
        """Close when the script has come to its end, and say why where that can't be."""
        if self._session.exit_handler.failed:
            return
        try:
            self._session.exit_handler.warn()
            self.close()
        except Exception as error:
            self._session.exit_handler.at_exit(error)
