"""What every method has in common in which each worker updates its whole copy of the model.

A step is the same whatever carries the sums; that is an `Exchange` of *runs*, flat memories of all
ranks that are added up: one a bucket, and a last one with the running statistics.

    pack ── send ── … ── wait, update              one bucket
      └ gradient_ready     └ before_read           (after this rank's `end`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from paceline.sync.bucket import Bucket
from paceline.sync.statistics import RunningStatistics
from paceline.sync.updater import Updater


class Exchange(Protocol):
    """Adds runs up over the ranks."""

    @property
    def packed(self) -> Sequence[Tensor]:
        """This rank's values of each run, (numel,); they stay from `send` until `wait`."""

    @property
    def sums(self) -> Sequence[Tensor]:
        """The sums of each run, (numel,), from `wait` until the next `send`."""

    def begin(self) -> None:
        """Expect all runs of a step; those of the step before have been waited for."""

    def send(self, index: int) -> None:
        """Start to add a run up; never block."""

    def next(self, index: int) -> int:
        """Return the run to wait for first by one who needs run `index`: itself, if it is there."""

    def wait(self, index: int, operation: str) -> None:
        """Return once a run's sums are there.

        Raises:
            CommError: a peer was lost, or silent.
        """

    def close(self) -> None:
        """Release what the exchange holds."""


class Replicated:
    """A synchronizer: sums of gradients, and an update of everything on every rank.

    Args:
        buckets: what is exchanged.
        exchange: of the buckets' runs, and of the statistics' where there are any.
        updater: updates parameters.
        statistics: the model's running statistics.
        world_size: the number of ranks.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        exchange: Exchange,
        updater: Updater,
        statistics: RunningStatistics,
        world_size: int,
    ) -> None:
        self.buckets = tuple(buckets)
        self._exchange = exchange
        self._updater = updater
        self._statistics = statistics
        self._world_size = world_size
        self._packed_memory = [b.over(exchange.packed[b.index]) for b in buckets]
        self._sums = [b.over(exchange.sums[b.index]) for b in buckets]
        self._pending: set[int] = set()  # runs that were sent and not yet waited for
        self._packed: dict[int, bool] = {}  # bucket: has this rank used all its parameters?
        self._step, self._weight = 0, 0.0
        self._ended = True  # what is pending belongs to an ended step and may be installed
        self._reduced = False

    def begin(self, step: int, weight: float) -> None:
        """Start a step; sums of the last one may still be under way, but not its statistics."""
        self._install_statistics()
        self._step, self._weight = step, weight
        self._reduced = False

    def before_read(self, bucket: Bucket) -> None:
        """Wait for the bucket's sums and update its parameters."""
        while self._ended and bucket.index in self._pending:
            self._install(self.buckets[self._exchange.next(bucket.index)])

    def gradient_ready(self, bucket: Bucket) -> None:
        """Pack the bucket and send it."""
        if self._ended:
            self._open()
        self._packed[bucket.index] = self._weight > 0 and all(
            p.grad is not None for p in bucket.parameters
        )
        self._packed_memory[bucket.index].pack(bucket, self._weight)
        self._send(bucket.index)

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
            for unit in dict.fromkeys(self._updater.unit(bucket) for bucket in self.buckets):
                self._updater.update(unit, [p.grad for bucket in unit for p in bucket.parameters])
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
        """Release the exchange."""
        self._exchange.close()

    def _open(self) -> None:
        """Make the memory free for this step, and send the running statistics of its forward."""
        for bucket in self.buckets:
            self.before_read(bucket)  # what nobody has read
        self._packed.clear()
        self._exchange.begin()
        self._ended = False
        self._statistics.pack(1 / self._world_size)
        if self._statistics.flat is not None:
            self._exchange.packed[-1].copy_(self._statistics.flat)
            self._send(len(self.buckets))

    def _send(self, index: int) -> None:
        self._pending.add(index)
        self._exchange.send(index)

    def _complete(self) -> None:
        """Send the buckets that backward left incomplete."""
        if self._ended:
            self._open()
        for bucket in self.buckets:
            if bucket.index not in self._packed:
                self.gradient_ready(bucket)

    def _install(self, bucket: Bucket) -> None:
        unit = self._updater.unit(bucket)
        gradients = [gradient for member in unit for gradient in self._receive(member)]
        self._updater.update(unit, gradients)

    def _receive(self, bucket: Bucket) -> list[Tensor | None]:
        """Wait for a bucket's sum; a gradient is None where no rank used the parameter."""
        self._pending.discard(bucket.index)
        self._exchange.wait(bucket.index, f"bucket {bucket.index} in step {self._step}")
        return self._sums[bucket.index].reduced(used_here=self._packed[bucket.index])

    def _install_statistics(self) -> None:
        """Install the mean of the running statistics, on all ranks between the same steps."""
        place = len(self.buckets)
        if self._ended and place in self._pending:
            self._pending.discard(place)
            self._exchange.wait(place, f"running statistics in step {self._step}")
            assert self._statistics.flat is not None
            self._statistics.flat.copy_(self._exchange.sums[-1])
            self._statistics.install()
