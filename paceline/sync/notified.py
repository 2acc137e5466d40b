"""`notified`: gradients go to their owners by puts, sums come back, and a layer waits for its own.

    gradient_ready        pack, put each shard to its owner             most urgent: read first
    owner's thread        all ranks' parts are there: add, put back
    before_read           wait for this bucket's sums, update           in the next forward

Nobody issues in an order that others must keep, so a bucket waits for nothing but itself. No wait
of a rank is for one that waits for it: a sum needs parts only, a part needs its sender's backward
only, and a backward needs the sums of the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from paceline.comm.window import Window
from paceline.sync.bucket import Bucket
from paceline.sync.layout import lay_out
from paceline.sync.owner import Owner
from paceline.sync.statistics import RunningStatistics
from paceline.sync.updater import Updater

OpenWindow = Callable[[int, int], Window]  # of a size and a number of notifications


class Notified:
    """A synchronizer on windows.

    Args:
        buckets: what is exchanged; fewer bytes a bucket, a finer order.
        open_window: opens this rank's window of this binding; collective.
        updater: updates every parameter, on every rank.
        statistics: the model's running statistics, exchanged in every step.
        world_size: the number of ranks.
        limit: seconds to wait for a peer.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        open_window: OpenWindow,
        updater: Updater,
        statistics: RunningStatistics,
        world_size: int,
        limit: float,
    ) -> None:
        self.buckets = tuple(buckets)
        self._updater = updater
        self._statistics = statistics
        self._world_size = world_size
        sizes = [(bucket.length, bucket.parameters[0].dtype) for bucket in buckets]
        if statistics.flat is not None:
            sizes.append((statistics.flat.numel(), statistics.flat.dtype))
        layout = lay_out(sizes, world_size)
        self._owner = Owner(open_window(layout.size, layout.notifications), layout, limit)
        self._packed_memory = [b.over(self._owner.packed[b.index]) for b in buckets]
        self._sums = [b.over(self._owner.sums[b.index]) for b in buckets]
        self._pending: set[int] = set()
        self._statistics_pending = False
        self._packed: dict[int, bool] = {}
        self._step, self._weight = 0, 0.0
        self._ended = True
        self._reduced = False

    def begin(self, step: int, weight: float) -> None:
        """Start a step; sums of the last one may still be under way, but not its statistics."""
        self._install_statistics()
        self._step, self._weight = step, weight
        self._reduced = False

    def before_read(self, bucket: Bucket) -> None:
        """Wait for the bucket's sums and update its parameters."""
        if not self._ended or bucket.index not in self._pending:
            return
        unit = self._updater.unit(bucket)
        self._updater.update(unit, [g for member in unit for g in self._receive(member)])

    def gradient_ready(self, bucket: Bucket) -> None:
        """Pack the bucket and put its shards to their owners."""
        if self._ended:
            self._open()
        self._packed[bucket.index] = self._weight > 0 and all(
            p.grad is not None for p in bucket.parameters
        )
        self._packed_memory[bucket.index].pack(bucket, self._weight)
        self._owner.send(bucket.index, -bucket.index)
        self._pending.add(bucket.index)

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
        """End the owner's thread and the window."""
        self._owner.close()

    def _open(self) -> None:
        for bucket in self.buckets:
            self.before_read(bucket)
        self._packed.clear()
        self._ended = False
        self._statistics.pack(1 / self._world_size)
        if self._statistics.flat is not None:
            self._owner.packed[-1].copy_(self._statistics.flat)
            self._owner.send(len(self.buckets), 0)
            self._statistics_pending = True

    def _complete(self) -> None:
        if self._ended:
            self._open()
        for bucket in self.buckets:
            if bucket.index not in self._packed:
                self.gradient_ready(bucket)

    def _receive(self, bucket: Bucket) -> list[Tensor | None]:
        self._pending.discard(bucket.index)
        self._owner.wait(bucket.index, f"bucket {bucket.index} of step {self._step}")
        return self._sums[bucket.index].reduced(used_here=self._packed[bucket.index])

    def _install_statistics(self) -> None:
        if self._ended and self._statistics_pending:
            self._owner.wait(len(self.buckets), f"running statistics of step {self._step}")
            self._statistics_pending = False
            assert self._statistics.flat is not None
            self._statistics.flat.copy_(self._owner.sums[-1])
            self._statistics.install()
