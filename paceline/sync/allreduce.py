"""`allreduce`: every rank sums each bucket's gradients with all others and updates its whole copy.

A bucket's all_reduce starts in backward as soon as its gradients are complete, and is awaited by
the first layer of the next forward that reads the bucket. All ranks issue in one order, the
running statistics and then the buckets by their numbers, because collectives are matched by order:
a bucket that is complete out of turn waits for its turn, and nobody waits for it.

    pack ── all_reduce ── … ── wait, update        one bucket
      └ gradient_ready           └ before_read     (after this rank's `end`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from paceline.comm.communicator import Communicator, Ticket
from paceline.sync.bucket import Bucket
from paceline.sync.statistics import RunningStatistics
from paceline.sync.updater import Updater


class AllReduce:
    """A synchronizer on collectives, of NCCL or Gloo."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        communicator: Communicator,
        updater: Updater,
        statistics: RunningStatistics,
    ) -> None:
        self.buckets = tuple(buckets)
        self._communicator = communicator
        self._updater = updater
        self._statistics = statistics
        self._memory = [bucket.allocate() for bucket in buckets]
        self._tickets: dict[int, Ticket] = {}  # issued and not yet installed
        self._statistics_ticket: Ticket | None = None
        self._step, self._weight = 0, 0.0
        self._packed: dict[int, bool] = {}  # bucket: has this rank used all its parameters?
        self._issued = 0
        self._ended = True  # tickets belong to an ended step and may be installed
        self._reduced = False

    def begin(self, step: int, weight: float) -> None:
        """Start a step; results of the last one may still be under way, but not its statistics."""
        self._install_statistics()
        self._step, self._weight = step, weight
        self._reduced = False

    def before_read(self, bucket: Bucket) -> None:
        """Wait for the bucket's all_reduce and update its parameters.

        As long as it isn't there, buckets that were sent before it are updated: they arrive before
        it, and their arithmetic hides under the rest of the exchange.
        """
        if not self._ended:
            return
        while (ticket := self._tickets.get(bucket.index)) is not None:
            if ticket.done():
                self._install(bucket)
            else:
                self._install(self.buckets[next(iter(self._tickets))])

    def _install(self, bucket: Bucket) -> None:
        unit = self._updater.unit(bucket)
        gradients = [gradient for member in unit for gradient in self._receive(member)]
        self._updater.update(unit, gradients)

    def gradient_ready(self, bucket: Bucket) -> None:
        """Pack the bucket and issue it, if it is its turn, and those that waited for it."""
        if self._ended:
            self._open()
        self._packed[bucket.index] = self._weight > 0 and all(
            p.grad is not None for p in bucket.parameters
        )
        self._memory[bucket.index].pack(bucket, self._weight)
        while self._issued in self._packed:
            flat = self._memory[self._issued].flat
            self._tickets[self._issued] = self._communicator.all_reduce(flat)
            self._issued += 1

    def reduce(self) -> None:
        """Make every `.grad` the global mean; None where nobody used the parameter."""
        self._complete()
        for bucket in self.buckets:
            for p, gradient in zip(bucket.parameters, self._receive(bucket), strict=True):
                p.grad = None if gradient is None else gradient.clone()  # theirs to keep
        self._reduced = True

    def end(self, step: int) -> None:
        """Send what backward didn't reach, and let the results be installed."""
        self._updater.freeze()
        if self._reduced:
            self._update_from_grad()
        else:
            self._complete()
        self._ended = True

    def abandon(self, step: int) -> None:
        """Drop the step's gradients, after the exchange that all ranks began."""
        if not self._reduced:
            self._complete()
            for bucket in self.buckets:
                self._receive(bucket)
        self._ended = True

    def settle(self) -> None:
        """Install whatever has been exchanged for the last ended step."""
        if not self._ended:
            return
        for bucket in self.buckets:
            self.before_read(bucket)
        self._install_statistics()

    @property
    def state(self) -> Mapping[str, Tensor]:
        """Nothing: optimizer and model hold it all."""
        return {}

    def close(self) -> None:
        """Forget what is under way."""
        self._tickets.clear()

    def _open(self) -> None:
        """Make the memory free for this step, and send the running statistics of its forward."""
        for bucket in self.buckets:
            self.before_read(bucket)  # what nobody has read
        if self._issued:  # an exchange of all ranks is complete: the start-up is over
            self._communicator.steady()
        self._packed.clear()
        self._issued = 0
        self._ended = False
        self._statistics.pack(1 / self._communicator.world_size)
        if self._statistics.flat is not None:
            self._statistics_ticket = self._communicator.all_reduce(self._statistics.flat)

    def _complete(self) -> None:
        """Issue the buckets that backward left incomplete."""
        if self._ended:
            self._open()
        for bucket in self.buckets:
            if bucket.index not in self._packed:
                self.gradient_ready(bucket)

    def _update_from_grad(self) -> None:
        for unit in dict.fromkeys(self._updater.unit(bucket) for bucket in self.buckets):
            self._updater.update(unit, [p.grad for bucket in unit for p in bucket.parameters])

    def _receive(self, bucket: Bucket) -> list[Tensor | None]:
        """Wait for a bucket's sum; a gradient is None where no rank used the parameter."""
        self._tickets.pop(bucket.index).wait(
            f"all_reduce of bucket {bucket.index} in step {self._step}"
        )
        return self._memory[bucket.index].reduced(used_here=self._packed[bucket.index])

    def _install_statistics(self) -> None:
        """Install the mean of the running statistics, on all ranks between the same steps."""
        if self._ended and self._statistics_ticket is not None:
            self._statistics_ticket.wait(f"all_reduce of running statistics in step {self._step}")
            self._statistics_ticket = None
            self._statistics.install()
