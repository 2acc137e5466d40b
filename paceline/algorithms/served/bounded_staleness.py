"""Bounded staleness: a worker trains on while its last versions are still under way.

A version of the parameters is one whole global batch: version v holds v batches, in order. Before
step t a worker waits for version t - K alone, and installs a newer one where it has arrived:

    step           0  1  2  3  4          with K = 2: step 4 waits for version 2,
    installed at   0  0  1  2  3          and version 3 is here already

So no worker leads the slowest one by more than K steps (stale synchronous parallel, SSP; Ho et al.,
2013), without any collective. The exchange has K + 1 slots for each bucket.

Running statistics are each worker's own until it settles: then it has the mean of the last step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from paceline.algorithms.data_parallel import UpdateRule
from paceline.algorithms.served.records import served_buckets
from paceline.algorithms.served.without_sums import WithoutSums
from paceline.algorithms.synchronizer import STATISTICS, StepInfo, Weights
from paceline.comm.peer_activities import Startup
from paceline.errors import Message
from paceline.reduce.buckets import Bucket
from paceline.reduce.put_engine.layout import Layout
from paceline.reduce.put_engine.put_exchange import PutExchange
from paceline.reduce.rank_state import RankState
from paceline.timeline.timeline import BEHIND, READS, Timeline
from paceline.update.batch_norm import RunningStatistics

_NOTED = 4  # versions: their slots take more than four times the memory of the parameters
_LARGE = 2**26  # bytes in a server; fewer aren't worth a line


def slots_note(layout: Layout, staleness: int) -> Message | None:
    """Return a sentence on the memory of all slots where it is large; else None.

    Args:
        layout: of the window of workers and servers.
    """
    weights = sum(b.numel * b.spec.dtype.itemsize for b in served_buckets(layout))
    if staleness < _NOTED or layout.server_size < _LARGE:
        return None
    return Message(
        "{--staleness} {} holds {} versions of what workers and servers receive, for parameters of "
        "{:,.1f} MiB: {:,.1f} MiB in each worker and {:,.1f} MiB in each server; a smaller "
        "{--staleness} takes less.",
        staleness,
        staleness + 1,
        weights / 2**20,
        layout.size / 2**20,
        layout.server_size / 2**20,
    )


class BoundedStaleness(WithoutSums):
    """Synchronizer of bounded staleness.

    Args:
        buckets: the buckets of parameters, which servers update.
        exchange: exchanges the buckets, with `staleness` + 1 slots.
        rule: lets the servers update, and installs.
        statistics: the model's running statistics.
        startup: ends after the first step.
        state: as of `DataParallel`.
        timeline: likewise.
        staleness: versions by which the parameters of a step may be behind.

    Attributes:
        installed: for each bucket, its version that is installed.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        exchange: PutExchange,
        rule: UpdateRule,
        statistics: RunningStatistics,
        startup: Startup,
        state: RankState | None,
        timeline: Timeline,
        staleness: int,
    ) -> None:
        super().__init__(buckets, exchange, rule, statistics, startup, state, timeline)
        self._puts = exchange
        self._staleness = staleness
        count = len(self.buckets) + (statistics.flat is not None)
        self._under_way: list[deque[int]] = [deque() for _ in range(count)]  # versions, by bucket
        self._last = [0] * count  # versions that were sent
        self._updates: set[int] = set()  # versions under way that return parameters
        self._read: set[int] = set()  # buckets that this step has read
        self.installed = [0] * len(self.buckets)

    def begin(self, step: StepInfo) -> None:
        """Start a step; earlier ones may still be under way."""
        self._step = step
        self._read.clear()

    def before_read(self, bucket: Bucket) -> None:
        """Wait for the oldest version that the step may use, and install the newest one here.

        Once in a step: forward and backward use the same values.
        """
        index = bucket.index
        if bucket is STATISTICS or not self._ended or index in self._read:
            return
        self._read.add(index)
        with temporarily_clear_interpreter_stack():  # the forward may be in one of `torch.func`'s
            self._install_until(bucket, self._last[index] - self._staleness)
        behind = self._last[index] - self.installed[index]
        self.reads[behind] += 1
        self._timeline.count(READS, 1)
        self._timeline.count(BEHIND, behind)

    def end(self, *, update: bool) -> None:
        """Send what backward didn't reach; let the servers update, or end without an update."""
        self.complete()
        if update:
            self._updates.update(self._last[:1] if self.buckets else ())
            super().end(update=True)
        else:
            self._rule.return_sums()
            self._ended = True

    def settle(self, weights: Weights = Weights.OWN) -> None:
        """Wait for the version of this worker's last step, and install it."""
        if not self._ended:
            return
        for bucket in self.buckets:
            self._install_until(bucket, self._last[bucket.index])
        if mean := self._take_statistics(0):
            self._statistics.install(mean[-1])

    def close(self, *, drain: bool = False) -> None:
        """Close the rule and the exchange."""
        if drain:
            self.settle()
        super().close(drain=drain)

    def _install_until(self, bucket: Bucket, oldest: int) -> None:
        """Wait for the versions up to `oldest`, take those that have arrived; install the last."""
        index = bucket.index
        under_way = self._under_way[index]
        values: list[Tensor | None] | None = None
        while under_way and (under_way[0] <= oldest or self._puts.arrived(index, under_way[0])):
            version = self._next(index)
            received = self._wait(index)
            self.installed[index] = version
            if version in self._updates:
                values = received
        if values is not None:
            self._install((bucket,), values)
        self._updates = {v for v in self._updates if v > min(self.installed)}

    def _take_statistics(self, unread: int) -> list[Tensor]:
        """Wait for the means of the running statistics, but for the last `unread` versions."""
        index = len(self.buckets)
        means = []
        while len(self._under_way) > index and len(self._under_way[index]) > unread:
            self._next(index)
            (mean,) = self._wait(index)
            assert mean is not None  # some worker has samples
            means.append(mean)
        return means

    def _next(self, index: int) -> int:
        """Return a bucket's oldest version under way, for which `_wait` waits next."""
        self._awaited[index] = version = self._under_way[index].popleft()
        return version

    def _wait_for_last_step(self) -> None:
        """Install what the next step needs; free the slot of what it sends."""
        for bucket in self.buckets:
            self.before_read(bucket)
        self._take_statistics(self._staleness)

    def _send(self, index: int, values: Sequence[Tensor | None], name: str) -> None:
        if index == len(self.buckets):  # their memory is written in each step
            values = [value if value is None else value.clone() for value in values]
        super()._send(index, values, name)
        self._last[index] = version = self._awaited.pop(index)
        self._under_way[index].append(version)
