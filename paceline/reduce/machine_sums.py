"""Sums inside a machine by collectives, on its GPUs; one of its ranks exchanges with the others'.

    every rank of a machine    reduce ──┐                              ┌── broadcast ─▶ wait, update
    its first, the leader               └─▶ to the CPU ─▶ exchange ────┘
                                                           │    ▲
    the other machines' leaders                            ▼    │

So a gradient crosses the bus to the CPU's memory, and the network, once a machine. A thread of each
rank does all of this, for every step in one order:

    reduces       running statistics, buckets 0, 1, 2, …      as backward completes them
    broadcasts    running statistics, buckets …, 2, 1, 0      as the next forward reads them

Collectives are matched by their order, and so the thread takes all reduces of a step before its
broadcasts, in whatever order gradients are complete or layers wait. Nobody waits for ever:

- A rank sends all its runs of a step before it waits for one, as `DataParallel` does. So a thread's
  reduces need nothing but its machine's backwards, and those the broadcasts of the step before.
- A broadcast needs the leader's sum, and that what all leaders have sent, in any order: reduces.
- Who computes waits in `wait` only, for a thread that waits for him only before his next `send`.

A neighbour that is lost, or silent, ends the thread by the communicator's error, another machine by
the far exchange's; both are raised in `wait`. Where a device hangs, `wait` has a limit of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from paceline.comm.communicator import Communicator, Ticket
from paceline.errors import CommError, CommTimeout, PeerLost
from paceline.reduce.buckets import BucketMemory, allocate
from paceline.reduce.exchange import Exchange
from paceline.reduce.gpu_staging import GpuStaging, pinned_like
from paceline.reduce.side_stream import SideStream

MakeFar = Callable[[Sequence[Sequence[Tensor]]], Exchange]

_OPERATION = "a sum of its machine"  # until it is known who asks
_GRACE_S = 5.0  # in which the thread says by itself whom it waits for
_CLOSE_S = 5.0


@dataclass(kw_only=True)
class _Run:
    """A run's memory, and how far its versions have come.

    Attributes:
        memory: what is added up, in place.
        full: this rank has all values.
        packed: an event: they are in the memory.
        sent: the versions that this rank has sent.
        summed: the versions whose sums are there.
    """

    memory: BucketMemory
    full: bool = True
    packed: Any = None
    sent: int = 0
    summed: int = 0


class MachineSums:
    """An exchange of a machine's ranks by collectives, and of the machines by another exchange.

    Args:
        ranks: of this machine, in order; the first is the leader.
        intra_machine: connects them, the leader as its rank 0; nobody else uses it meanwhile.
        make_far: makes, on a leader, what adds up leaders' values, on the CPU.
        templates: of each run, tensors of its parameters' shapes, strides and devices.
        names: of each run, the parameters' names.
        buckets: how many of the runs are buckets; those behind them go first.
        limits: seconds to wait for a neighbour, in the first step and later.
        steady: is called after the first step.
    """

    zero_copy = False

    def __init__(
        self,
        ranks: Sequence[int],
        intra_machine: Communicator,
        make_far: MakeFar,
        templates: Sequence[Sequence[Tensor]],
        names: Sequence[Sequence[str]],
        buckets: int,
        limits: tuple[float, float],
        steady: Callable[[], None] = lambda: None,
    ) -> None:
        self._intra_machine, self._steady = intra_machine, steady
        self._rank = ranks[intra_machine.rank]
        self._others = [rank for rank in ranks if rank != self._rank]
        self._runs = [_Run(memory=allocate(tensors)) for tensors in templates]
        self._inter_machine: Exchange | None = None
        if intra_machine.rank == 0:
            places = [run.memory.gradients for run in self._runs]
            sent = [[pinned_like(place) for place in tensors] for tensors in places]
            self._inter_machine = GpuStaging(make_far(sent), places, sent, names, limits, places)
        numbers = range(len(self._runs))
        self._reduces = (*numbers[buckets:], *numbers[:buckets])
        self._broadcasts = (*numbers[buckets:], *reversed(numbers[:buckets]))
        self._limit, self._later = limits
        self._stream = SideStream([run.memory.flat.device for run in self._runs])
        self._changed = threading.Condition()
        self._progress = 0  # collectives that are done
        self._error: BaseException | None = None
        self._left = self._closed = False
        self._thread = threading.Thread(target=self._work, name="machine sums", daemon=True)
        self._thread.start()

    def steady(self) -> None:
        """Wait less long from now on."""
        self._limit = self._later
        self._intra_machine.steady()
        if self._inter_machine is not None:
            self._inter_machine.steady()
        self._steady()

    def begin(self, *, applied: bool, scale: float) -> None:
        """Begin a step; the thread has nothing left to do of the one before."""
        if self._inter_machine is not None:
            self._inter_machine.begin(applied=applied, scale=scale)

    def traffic(self, index: int) -> tuple[int, int]:
        """Return the bytes that go to other machines and come from them."""
        return (0, 0) if self._inter_machine is None else self._inter_machine.traffic(index)

    def next(self, index: int) -> int:
        """Return the run itself: they arrive in the order in which they are needed."""
        return index

    def send(self, index: int, values: Sequence[Tensor | None], weight: float) -> None:
        """Pack the run, which the thread takes in its turn."""
        run = self._runs[index]
        run.memory.pack(values, weight)
        run.full = weight > 0 and all(value is not None for value in values)
        run.packed = self._stream.told()
        with self._changed:
            run.sent += 1
            self._changed.notify_all()

    def wait(self, index: int, operation: str) -> list[Tensor | None]:
        """Return the sums, where the values were.

        Raises:
            CommError: a peer was lost, or silent, or the device was.
        """
        run = self._runs[index]
        self._wait_for(run, operation)
        return run.memory.reduced(used_here=run.full)

    def discard(self, index: int, operation: str) -> None:
        """Wait for the sums, and forget them; raises as `wait`."""
        self._wait_for(self._runs[index], operation)

    def drain(self) -> None:
        """Let the leader serve the others until they have all their sums."""
        with self._changed:
            idle = self._error is None and all(run.summed == run.sent for run in self._runs)
        if idle:
            if self._inter_machine is not None:
                self._inter_machine.drain()
            self._left = True  # the neighbours have theirs, as this rank has

    def close(self) -> None:
        """End the thread and the exchanges; the neighbours lose who didn't leave."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if not self._left:
            self._intra_machine.close()
        if self._inter_machine is not None:
            self._inter_machine.close()
        self._thread.join(_CLOSE_S)

    def _wait_for(self, run: _Run, operation: str) -> None:
        """Wait until a run's last version is summed, as long as the thread gets on."""
        with self._changed:
            while run.summed < run.sent and self._error is None:
                gets_on = partial(self._got_on, self._progress)
                if not self._changed.wait_for(gets_on, self._limit + _GRACE_S):
                    raise CommTimeout(
                        f"rank {self._rank} waited {self._limit:g} s for the sum of its machine in "
                        f"{operation}: its device hangs, or it needs a longer --timeout "
                        "(--first_iter_timeout in the start)."
                    )
            if run.summed == run.sent:
                return
        if isinstance(self._error, CommError):
            raise type(self._error)(str(self._error).replace(_OPERATION, operation))
        assert self._error is not None
        raise self._error

    def _work(self) -> None:
        try:
            with self._stream.entered():
                while self._make_step():
                    pass
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _make_step(self) -> bool:
        """Add all runs up once; return False where the exchange was closed before."""
        for index in self._reduces:
            run = self._runs[index]
            with self._changed:
                self._changed.wait_for(partial(self._may_take, run))
                if self._closed:
                    return False
            self._reduce(index)
        for index in self._broadcasts:
            self._broadcast(index)
        return True

    def _reduce(self, index: int) -> None:
        """Add up what the machine has of a run, and let the leader send it."""
        run = self._runs[index]
        self._stream.wait_for(run.packed)
        self._collective(self._intra_machine.reduce, run.memory.flat)
        if self._inter_machine is not None:
            self._inter_machine.send(index, run.memory.reduced(used_here=run.full), 1.0)
        self._get_on()

    def _broadcast(self, index: int) -> None:
        """Let all ranks of the machine have what the leader's sums are."""
        run = self._runs[index]
        if self._inter_machine is not None:
            run.memory.mark_used(self._inter_machine.wait(index, _OPERATION))
        self._collective(self._intra_machine.broadcast, run.memory.flat)
        self._stream.finish()
        self._get_on(run)

    def _may_take(self, run: _Run) -> bool:
        return self._closed or run.sent > run.summed

    def _got_on(self, since: int) -> bool:
        return self._progress > since or self._error is not None

    def _get_on(self, summed: _Run | None = None) -> None:
        with self._changed:
            self._progress += 1
            if summed is not None:
                summed.summed += 1
            self._changed.notify_all()

    def _collective(self, start: Callable[[Tensor], Ticket], flat: Tensor) -> None:
        """Start a collective and wait for it: on a GPU, let the stream."""
        try:
            start(flat).wait(_OPERATION)
        except CommTimeout as error:
            raise CommTimeout(
                f"rank {self._rank} waited {self._limit:g} s for {self._whom} in {_OPERATION}: it "
                "hangs, or needs a longer --timeout (--first_iter_timeout in the start)."
            ) from error
        except PeerLost as error:
            raise PeerLost(
                f"rank {self._rank} lost {self._whom} in {_OPERATION}: the connection inside "
                "their machine ended."
            ) from error

    @property
    def _whom(self) -> str:
        """Name the neighbours, of whom a collective says no more."""
        ranks = ", ".join(map(str, self._others))
        return f"rank {ranks}" if len(self._others) == 1 else f"one of ranks {ranks}"
