"""`allreduce`: every rank sums each bucket's gradients with all others and updates its whole copy.

A bucket's all_reduce starts in backward as soon as its gradients are complete, and is awaited by
the first layer of the next forward that reads the bucket. All ranks issue in one order, the
running statistics and then the buckets by their numbers, because collectives are matched by order:
a bucket that is complete out of turn waits for its turn, and nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.comm.communicator import Communicator, Ticket
from paceline.sync.bucket import Bucket
from paceline.sync.replicated import Replicated
from paceline.sync.statistics import RunningStatistics
from paceline.sync.updater import Updater


class AllReduce(Replicated):
    """A synchronizer on collectives, of NCCL or Gloo."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        communicator: Communicator,
        updater: Updater,
        statistics: RunningStatistics,
    ) -> None:
        exchange = Collectives(buckets, communicator, statistics)
        super().__init__(buckets, exchange, updater, statistics, communicator.world_size)


class Collectives:
    """An exchange by all_reduce, in place.

    Attributes:
        packed, sums: the same memory, of each bucket, and of the statistics where there are any.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        communicator: Communicator,
        statistics: RunningStatistics,
    ) -> None:
        self._communicator = communicator
        self._buckets = len(buckets)
        self.packed = [bucket.allocate().flat for bucket in buckets]
        if statistics.flat is not None:
            self.packed.append(statistics.flat.clone())
        self.sums = self.packed
        places = range(len(self.packed))
        self._order = [*places[self._buckets :], *places[: self._buckets]]
        self._ready: set[int] = set()  # complete, and to be issued in their turn
        self._issued = 0
        self._tickets: dict[int, Ticket] = {}  # in the order of their issue

    def begin(self) -> None:
        """Begin the order anew."""
        if self._issued:  # an exchange of all ranks is complete: the start-up is over
            self._communicator.steady()
        self._ready.clear()
        self._issued = 0

    def send(self, index: int) -> None:
        """Issue the run, if it is its turn, and those that waited for it."""
        self._ready.add(index)
        while self._issued < len(self._order) and self._order[self._issued] in self._ready:
            turn = self._order[self._issued]
            self._tickets[turn] = self._communicator.all_reduce(self.packed[turn])
            self._issued += 1

    def next(self, index: int) -> int:
        """Return the bucket that was sent first, as long as `index` isn't there.

        They arrive in the order of their issue, so a bucket's arithmetic hides under the exchange
        of those that were sent after it.
        """
        if self._tickets[index].done():
            return index
        return next(place for place in self._tickets if place < self._buckets)

    def wait(self, index: int, operation: str) -> None:
        """Wait for the run's all_reduce."""
        self._tickets.pop(index).wait(f"all_reduce of {operation}")

    def close(self) -> None:
        """Forget what is under way."""
        self._tickets.clear()
