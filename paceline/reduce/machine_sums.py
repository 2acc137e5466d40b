"""Where a machine has several GPUs: sums on them by collectives, then between machines.

    every rank of a machine    reduce ──┐                              ┌── broadcast ─▶ wait, update
    its first, the leader               └─▶ to the CPU ─▶ exchange ────┘
                                                           │    ▲
    the other machines' leaders                            ▼    │

So a gradient crosses the bus to the CPU's memory, and the network, once a machine. A thread of each
rank does all of this, for every step in one order:

    reduces       running statistics, buckets 0, 1, 2, …      as backward completes them
    broadcasts    running statistics, buckets …, 2, 1, 0      as the next forward reads them

Collectives are matched by their order. So the thread runs all reduces of a step before its
broadcasts, in whatever order gradients are complete or layers wait. It can't deadlock:

- A rank sends all its buckets of a step before it waits for one, as `DataParallel` does. So the
  reduces need nothing but the machine's backward passes, and those the broadcasts of the step
  before.
- A broadcast needs the leader's sum, and that the contributions of all leaders, in any order: their
  reduces.
- The thread that computes waits in `wait` only, for a thread that waits for it only before its next
  `send`.

A rank of the machine that is lost, or silent, ends the thread by the communicator's error; another
machine ends it by the inner exchange's. `wait` raises both. Where a device hangs, `wait` has a
limit of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from paceline.comm.communicator import Communicator, Ticket
from paceline.comm.peer_activities import Timeout
from paceline.comm.window import timed_out
from paceline.errors import CommTimeout, PeerLost
from paceline.reduce.buckets import BucketMemory, allocate
from paceline.reduce.exchange import Exchange
from paceline.reduce.gpu_staging import GpuStaging, pinned_like
from paceline.reduce.side_stream import SideStream

MakeExchange = Callable[[Sequence[Sequence[Tensor]]], Exchange]

_GRACE_S = 5.0  # in which the thread's own wait times out, and names the peer
_CLOSE_S = 5.0


@dataclass(kw_only=True)
class _BucketState:
    """Bucket state of the hierarchical exchange: its buffer and versions.

    Attributes:
        memory: flat buffer of the values, which are summed in place.
        full: whether this rank has a value for every parameter.
        packed: CUDA event after the copy of the values into `memory`; None on a CPU.
        operation: description of the most recent version, for errors.
        sent: the last version that this rank has sent.
        summed: the last version whose sums have arrived; the exchange's thread writes it.
        inter_machine: on a leader, the version of the exchange between machines; likewise.
    """

    memory: BucketMemory
    full: bool = True
    packed: Any = None
    operation: str = ""
    sent: int = 0
    summed: int = 0
    inter_machine: int = 0

    def reduced(self) -> list[Tensor | None]:
        """Return the sums; None where no rank used the parameter."""
        return self.memory.reduced([True] * len(self.memory.gradients) if self.full else None)


class MachineSums:
    """Hierarchical exchange: reduces inside each machine with collectives, then between leaders.

    Args:
        ranks: the ranks of this machine, in order; the first is the leader.
        machine: communicator of these ranks, in which the leader has rank 0; reserved for
            this exchange.
        make_exchange: called on a leader; makes the exchange of CPU tensors between leaders.
        templates: for each bucket, tensors of its parameters' shapes, strides and devices.
        names: for each bucket, the parameters' names.
        gradients: the number of buckets that hold gradients. A bucket of running statistics has
            the next index, and is exchanged before them.
        timeout: timeout of each wait for a rank of this machine.
    """

    zero_copy = False

    def __init__(
        self,
        ranks: Sequence[int],
        machine: Communicator,
        make_exchange: MakeExchange,
        templates: Sequence[Sequence[Tensor]],
        names: Sequence[Sequence[str]],
        gradients: int,
        timeout: Timeout,
    ) -> None:
        self._machine = machine
        self._timeout = timeout
        self._rank = ranks[machine.rank]
        self._others = [rank for rank in ranks if rank != self._rank]
        self._buckets = [_BucketState(memory=allocate(tensors)) for tensors in templates]
        self._inter_machine: Exchange | None = None
        if machine.rank == 0:
            sums = [bucket.memory.gradients for bucket in self._buckets]
            pinned = [[pinned_like(tensor) for tensor in tensors] for tensors in sums]
            exchange = make_exchange(pinned)
            self._inter_machine = GpuStaging(exchange, sums, pinned, names, timeout, sums)
        inner = self._inter_machine
        self.traffic = [(0, 0)] * len(self._buckets) if inner is None else inner.traffic
        numbers = range(len(self._buckets))
        self._reduces = (*numbers[gradients:], *numbers[:gradients])
        self._broadcasts = (*numbers[gradients:], *reversed(numbers[:gradients]))
        self._stream = SideStream([bucket.memory.flat.device for bucket in self._buckets])
        self._changed = threading.Condition()
        self._progress = 0  # collectives that are done
        self._error: BaseException | None = None
        self._drained = self._closed = False
        self._thread = threading.Thread(target=self._work, name="machine sums", daemon=True)
        self._thread.start()

    def begin(self, scale: float, indices: Sequence[int] | None = None) -> None:
        """Begin a step; the thread has nothing left to do of the one before."""
        if self._inter_machine is not None:
            self._inter_machine.begin(scale, indices)

    def first_to_wait_for(self, index: int) -> int:
        """Return the bucket itself: sums come in the order in which they are needed."""
        return index

    def send(
        self, index: int, values: Sequence[Tensor | None], weight: float, operation: str
    ) -> int:
        """Pack the bucket, which the thread takes in its turn."""
        bucket = self._buckets[index]
        bucket.operation = operation
        bucket.memory.pack(values, weight)
        bucket.full = weight > 0 and all(value is not None for value in values)
        bucket.packed = self._stream.record()
        with self._changed:
            bucket.sent += 1
            self._changed.notify_all()
        return bucket.sent

    def wait(self, index: int, version: int) -> list[Tensor | None]:
        """Return the sums, where the values were.

        Raises:
            CommError: a peer was lost, or a wait for a peer or for the device timed out.
        """
        bucket = self._buckets[index]
        self._wait_for(bucket, version)
        return bucket.reduced()

    def abandon(self, index: int, version: int | None) -> None:
        """Wait for the sums if `wait` hasn't, and let the step leave no trace; raises as `wait`."""
        if version is not None:
            self._wait_for(self._buckets[index], version)
        if self._inter_machine is not None:
            self._inter_machine.abandon(index, None)  # the thread has waited for them

    def drain(self) -> None:
        """Return, on a leader, once the other machines have all their sums, or within a limit."""
        with self._changed:
            idle = self._error is None and all(b.summed == b.sent for b in self._buckets)
        if idle:
            if self._inter_machine is not None:
                self._inter_machine.drain()
            self._drained = True  # the ranks of the machine have theirs, as this rank has

    def close(self) -> None:
        """End the thread and the exchanges; without `drain`, this machine's ranks lose this one."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if not self._drained:
            self._machine.abort()
        if self._inter_machine is not None:
            self._inter_machine.close()
        self._thread.join(_CLOSE_S)

    def _wait_for(self, bucket: _BucketState, version: int) -> None:
        """Wait until a bucket's version is summed, as long as the thread makes progress."""
        while bucket.summed < version and self._error is None:
            progress = partial(self._has_progress, self._progress)
            seconds = self._timeout.seconds + _GRACE_S
            with self._timeout.limit(bucket.operation, seconds) as limit:
                while not progress():
                    if limit.look():
                        cause = "its device hangs"
                        raise self._timed_out("the sum of its machine", bucket, cause)
                    with self._changed:
                        self._changed.wait_for(progress, limit.slice())
        with self._changed:
            if bucket.summed >= version:
                return
        assert self._error is not None
        if isinstance(self._error, PeerLost):
            raise self._error.during(bucket.operation) from self._error
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
        """Sum all buckets once; return False where the exchange was closed before."""
        for index in self._reduces:
            bucket = self._buckets[index]
            with self._changed:
                self._changed.wait_for(partial(self._may_take, bucket))
                if self._closed:
                    return False
            self._reduce(index)
        for index in self._broadcasts:
            self._broadcast(index)
        return True

    def _reduce(self, index: int) -> None:
        """Sum a bucket inside the machine, and let the leader send it."""
        bucket = self._buckets[index]
        self._stream.wait_for(bucket.packed)
        self._collective(self._machine.reduce, bucket)
        if self._inter_machine is not None:
            sums = bucket.reduced()
            bucket.inter_machine = self._inter_machine.send(index, sums, 1.0, bucket.operation)
        self._note_progress()

    def _broadcast(self, index: int) -> None:
        """Broadcast the leader's sums of a bucket inside the machine."""
        bucket = self._buckets[index]
        if self._inter_machine is not None:
            bucket.memory.mark_used(self._inter_machine.wait(index, bucket.inter_machine))
        self._collective(self._machine.broadcast, bucket)
        self._stream.finish()
        self._note_progress(bucket)

    def _may_take(self, bucket: _BucketState) -> bool:
        return self._closed or bucket.sent > bucket.summed

    def _has_progress(self, since: int) -> bool:
        return self._progress > since or self._error is not None

    def _note_progress(self, summed: _BucketState | None = None) -> None:
        with self._changed:
            self._progress += 1
            if summed is not None:
                summed.summed += 1
            self._changed.notify_all()

    def _collective(self, start: Callable[[Tensor], Ticket], bucket: _BucketState) -> None:
        """Start a collective and wait for it: on a GPU, let the stream wait."""
        peer = f"rank {', '.join(map(str, self._others))}"
        if len(self._others) > 1:  # a collective names none of them
            peer = f"one of ranks {peer.removeprefix('rank ')}"
        try:
            start(bucket.memory.flat).wait(bucket.operation)
        except CommTimeout as error:
            raise self._timed_out(peer, bucket, "it hangs") from error
        except PeerLost as error:
            raise PeerLost(
                f"rank {self._rank} lost {peer} in {bucket.operation}: the connection inside "
                "their machine ended."
            ) from error

    def _timed_out(self, peer: str, bucket: _BucketState, cause: str) -> CommTimeout:
        return timed_out(self._rank, self._timeout.seconds, peer, bucket.operation, cause)
