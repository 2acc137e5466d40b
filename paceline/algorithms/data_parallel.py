"""What every method has in common in which each worker updates its whole copy of the model.

A step is the same whatever carries the sums; that is an `Exchange` of *runs*, flat memories of all
ranks that are added up: one a bucket, and a last one with the running statistics.

    send ── … ── wait, update              one bucket
      └ gradient_ready └ before_read       (after this rank's `end`)
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.recorder import NullRecorder, Recorder
from paceline.reduce.buckets import Bucket
from paceline.reduce.exchange import Exchange
from paceline.reduce.rank_state import RankState
from paceline.update.batch_norm import RunningStatistics
from paceline.update.updater import Updater


class DataParallel:
    """A synchronizer: sums of gradients, and an update of everything on every rank.

    Args:
        buckets: what is exchanged.
        exchange: of the buckets' runs, and of the statistics' where there are any.
        updater: updates parameters.
        statistics: the model's running statistics.
        world_size: the number of ranks.
        recorder: measures what this rank's own thread does for the exchange: spans `wait` (for
            others), `send` and `update`, each with its bucket, and the bytes `sent` and `received`.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        exchange: Exchange,
        updater: Updater,
        statistics: RunningStatistics,
        world_size: int,
        recorder: Recorder | None = None,
    ) -> None:
        self.buckets = tuple(buckets)
        self._exchange = exchange
        self._updater = updater
        self._statistics = statistics
        self._world_size = world_size
        self._recorder = recorder or NullRecorder()
        self._pending: set[int] = set()  # runs that were sent and not yet waited for
        self._sent: set[int] = set()  # buckets, in this step
        self._applied = True  # the last step took effect
        self._step, self._weight, self._scale = 0, 0.0, 1.0
        self._exchanged = 0  # the step whose sums are under way
        self._ended = True  # what is pending belongs to an ended step and may be installed
        self._reduced = False

    def begin(self, step: int, weight: float, scale: float) -> None:
        """Start a step; sums of the last one may still be under way, but not its statistics."""
        self._install_statistics()
        self._step, self._weight, self._scale = step, weight, scale
        self._reduced = False

    def before_read(self, bucket: Bucket) -> None:
        """Wait for the bucket's sums and update its parameters."""
        while self._ended and bucket.index in self._pending:
            self._install(self.buckets[self._exchange.next(bucket.index)])

    def gradient_ready(self, bucket: Bucket) -> None:
        """Send the bucket."""
        if self._ended:
            self._open()
        self._sent.add(bucket.index)
        self._send(bucket.index, bucket.gradients, self._weight)

    def reduce(self) -> None:
        """Make every `.grad` the global mean; None where nobody used the parameter."""
        self._complete()
        for bucket in self.buckets:
            for p, gradient in zip(bucket.parameters, self._receive(bucket), strict=True):
                p.grad = None if gradient is None else gradient.clone()  # theirs to keep
        self._reduced = True

    def end(self, step: int) -> None:
        """Send what backward didn't reach, and let the results be installed.

        Without a forward the last step's may be yet to come, with the hyperparameters of then.
        """
        self._complete()
        self._updater.freeze()
        if self._reduced:
            for unit in dict.fromkeys(self._updater.unit(bucket) for bucket in self.buckets):
                self._update(unit, [p.grad for bucket in unit for p in bucket.parameters])
        self._applied = self._ended = True

    def abandon(self, step: int) -> None:
        """Drop the step's gradients, after the exchange that all ranks began."""
        if not self._reduced:
            self._complete()
            for bucket in self.buckets:
                self._pending.discard(bucket.index)
                with self._recorder.span("wait", bucket=bucket.index):
                    self._exchange.discard(bucket.index, self._operation(bucket))
        self._applied, self._ended = False, True

    def settle(self) -> None:
        """Install whatever has been exchanged for the last ended step."""
        if not self._ended:
            return
        for bucket in self.buckets:
            self.before_read(bucket)
        self._install_statistics()

    @property
    def state(self) -> RankState | None:
        """None: optimizer and model hold it all."""
        return None

    def release(self) -> None:
        """Settle, if the exchange still reads gradients."""
        if self._exchange.zero_copy:
            self.settle()

    def drain(self) -> None:
        """Stay until the peers have what they need."""
        self._exchange.drain()

    def close(self) -> None:
        """Release the exchange."""
        self._exchange.close()

    def _open(self) -> None:
        """Make the memory free for this step, and send the running statistics of its forward."""
        for bucket in self.buckets:
            self.before_read(bucket)  # what nobody has read
        if self._sent:
            self._exchange.steady()
        self._sent.clear()
        self._exchange.begin(applied=self._applied, scale=self._scale)
        self._exchanged = self._step
        self._ended = False
        self._statistics.pack()
        if self._statistics.flat is not None:
            self._send(len(self.buckets), [self._statistics.flat], 1 / self._world_size)

    def _send(self, index: int, values: Sequence[Tensor | None], weight: float) -> None:
        self._pending.add(index)
        with self._recorder.span("send", bucket=index):
            self._exchange.send(index, values, weight)
        sent, received = self._exchange.traffic(index)
        self._recorder.count("sent", sent)
        self._recorder.count("received", received)

    def _complete(self) -> None:
        """Send the buckets that backward left incomplete."""
        if self._ended:
            self._open()
        for bucket in self.buckets:
            if bucket.index not in self._sent:
                self.gradient_ready(bucket)

    def _install(self, bucket: Bucket) -> None:
        unit = self._updater.unit(bucket)
        gradients = [gradient for member in unit for gradient in self._receive(member)]
        self._update(unit, gradients)

    def _update(self, unit: tuple[Bucket, ...], gradients: Sequence[Tensor | None]) -> None:
        with self._recorder.span("update", bucket=unit[0].index):
            self._updater.update(unit, gradients)

    def _wait(self, index: int, operation: str) -> list[Tensor | None]:
        self._pending.discard(index)
        with self._recorder.span("wait", bucket=index):
            return self._exchange.wait(index, operation)

    def _receive(self, bucket: Bucket) -> list[Tensor | None]:
        """Wait for a bucket's sum; a gradient is None where no rank used the parameter."""
        return self._wait(bucket.index, self._operation(bucket))

    def _operation(self, bucket: Bucket) -> str:
        return f"bucket {bucket.index} in step {self._exchanged}"

    def _install_statistics(self) -> None:
        """Install the mean of the running statistics, on all ranks between the same steps."""
        place = len(self.buckets)
        if self._ended and place in self._pending:
            (mean,) = self._wait(place, f"running statistics in step {self._exchanged}")
            assert mean is not None
            self._statistics.install(mean)
