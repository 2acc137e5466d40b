"""What all methods share: a synchronizer over any exchange, and the rule of which rank updates.

A step is the same, whatever carries the sums and whichever rank updates. A method is a composition
of

    exchange    sums each bucket over the ranks: `Collectives`, `PutExchange`, …
    rule        which rank updates what: each all by an `Updater`, or `ShardedUpdate` (ZeRO-1)

    send ── … ── wait, install             one bucket; running statistics go first
      └ gradient_ready └ before_read       (after this rank's `end`)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from paceline.algorithms.synchronizer import STATISTICS, StepInfo, Weights
from paceline.comm.peer_activities import Startup
from paceline.errors import ConfigError
from paceline.reduce.buckets import Bucket
from paceline.reduce.exchange import Exchange
from paceline.reduce.rank_state import RankState
from paceline.timeline.timeline import Timeline
from paceline.update.batch_norm import RunningStatistics


class UpdateRule(Protocol):
    """Protocol of an update rule, which turns a step's sums into updated parameters.

    Attributes:
        installs_sums: whether what is installed are sums of gradients; otherwise, parameters.
    """

    installs_sums: bool

    def unit(self, bucket: Bucket) -> tuple[Bucket, ...]:
        """Return the buckets that are installed together with one, itself included."""

    def return_sums(self) -> None:
        """Let the sums of a step return as they are; all its buckets were sent."""

    def freeze(self, *, reduced: bool, deferred: bool) -> Mapping[int, int]:
        """Freeze the hyperparameters of a step; all its buckets were sent.

        Args:
            reduced: the sums have returned, and parameters' `.grad` take their place.
            deferred: a script may write the parameters before their updates.

        Returns:
            the versions, by bucket, in which what the owners update by `.grad` returns; empty
            where there are no other owners, or the step's first versions return it.
        """

    def update(self, unit: tuple[Bucket, ...], values: Sequence[Tensor | None]) -> None:
        """Update a unit's parameters by what the exchange returned, one value a parameter."""

    def close(self) -> None:
        """Let go of the optimizer."""


class DataParallel:
    """Data-parallel synchronizer: a composition of an exchange and an update rule.

    Args:
        buckets: the buckets of parameters whose gradients are exchanged.
        exchange: exchanges the buckets. If the model has running statistics, they are exchanged
            first, as one more bucket with index len(buckets).
        rule: updates the parameters from the exchanged sums.
        statistics: the model's running statistics.
        startup: ended once, after the first step; None: all waits have one timeout.
        state: state that a checkpoint must save in addition to model and optimizer, or None.
        timeline: receives this thread's spans `wait` (for peers), `send` and `update`, each with
            its bucket, and the numbers of bytes `sent` and `received`.
        alone: whether this rank is the only one: `end` installs the step's result, and the running
            statistics aren't exchanged.
    """

    reads: Counter[int] | None = None

    def __init__(
        self,
        buckets: Sequence[Bucket],
        exchange: Exchange,
        rule: UpdateRule,
        statistics: RunningStatistics,
        startup: Startup | None = None,
        state: RankState | None = None,
        timeline: Timeline | None = None,
        *,
        alone: bool = False,
    ) -> None:
        self.buckets = tuple(buckets)
        self.state = state
        self.immediate = alone
        self._exchange = exchange
        self._rule = rule
        self._statistics = statistics
        self._startup = startup
        self._timeline = timeline or Timeline()
        self._awaited: dict[int, int] = {}  # by bucket, the version that is to be waited for
        self._sent: set[int] = set()  # buckets, in this step
        self._step = StepInfo(0, 0.0)
        self._ended = True  # what is awaited belongs to an ended step and may be installed
        self._reduced = self._exposing = False

    def begin(self, step: StepInfo) -> None:
        """Start a step; sums of the last one may still be under way, but not its statistics."""
        self._install_statistics()
        self._step = step
        self._reduced = False

    def before_read(self, bucket: Bucket) -> None:
        """Wait for the bucket's sums and update its parameters."""
        if bucket is STATISTICS:
            self._install_statistics()
        while self._ended and bucket.index in self._awaited:
            if peek_interpreter_stack() is None:
                self._wait_and_install(bucket)
            else:  # the forward is inside of a transform of `torch.func`, and this mustn't be
                with temporarily_clear_interpreter_stack():
                    self._wait_and_install(bucket)

    def gradient_ready(self, bucket: Bucket) -> None:
        """Send the bucket."""
        if self._ended:
            self._open()
        self._sent.add(bucket.index)
        gradients = [p.grad for p in bucket.parameters]
        self._send(bucket.index, gradients, f"bucket {bucket.index}")

    def complete(self) -> None:
        """Send the buckets that backward left incomplete."""
        if self._ended:
            self._open()
        for bucket in self.buckets:
            if bucket.index not in self._sent:
                self.gradient_ready(bucket)

    def reduce(self) -> None:
        """Make every `.grad` the global mean; None where no rank used the parameter."""
        self.complete()
        self._rule.return_sums()
        for bucket in self.buckets:
            sums = self._wait(bucket.index)
            for p, gradient in zip(bucket.parameters, sums, strict=True):
                if gradient is not p.grad:
                    p.grad = None if gradient is None else gradient.clone()  # the caller's own
        self._reduced = True

    def begin_again(self) -> None:
        """Begin another exchange of the step: of gradients, and of statistics."""
        if (index := len(self.buckets)) in self._awaited:
            self._wait(index)  # not installed: those of the second forward include it
        self._begin_exchange()
        self._reduced = False

    def expose(self, parameter: Tensor) -> None:
        """Settle, and keep the sums."""
        for bucket in self.buckets:
            names = [
                n for p, n in zip(bucket.parameters, bucket.names, strict=True) if p is parameter
            ]
            if names and not (self._rule.installs_sums and bucket.index in self._awaited):
                raise ConfigError(
                    f"the gradient of {names[0]} was used after optimizer.step(), when this rank "
                    "has only its own part of it: use gradients before optimizer.step()."
                )
        self._exposing = True
        try:
            self.settle()
        finally:
            self._exposing = False

    def end(self, *, update: bool) -> None:
        """Send what backward didn't reach, and let the results be installed.

        If no forward ran since the last step, its update is still pending, with that step's
        hyperparameters. Without an update the exchange is made all the same, as all ranks began it.
        """
        if not update:
            self._abandon()
            return
        self.complete()
        returning = self._rule.freeze(reduced=self._reduced, deferred=not self.immediate)
        self._awaited.update(returning)
        if self._reduced and not returning:
            for unit in dict.fromkeys(self._rule.unit(bucket) for bucket in self.buckets):
                self._install(unit, [p.grad for bucket in unit for p in bucket.parameters])
        self._ended = True
        if self.immediate:
            self.settle()

    def _abandon(self) -> None:
        if not self._reduced:
            self.complete()
            self._rule.return_sums()
        for bucket in self.buckets:
            version = self._awaited.pop(bucket.index, None)
            with self._timeline.span("wait", bucket=bucket.index):
                self._exchange.abandon(bucket.index, version)
        self._ended = True

    def settle(self, weights: Weights = Weights.OWN) -> None:
        """Install what has been exchanged for the last ended step: then replicas are equal."""
        if not self._ended:
            return
        self._wait_for_last_step()
        self._install_statistics()

    def _install_statistics(self) -> None:
        """Install the running statistics' mean by samples, on all ranks between the same steps."""
        index = len(self.buckets)
        if self._ended and index in self._awaited:
            (mean,) = self._wait(index)
            assert mean is not None  # some rank has samples
            self._statistics.install(mean)

    def wait_writable(self) -> None:
        """Settle, if the exchange still reads gradients."""
        if self._exchange.zero_copy:
            self.settle()

    def close(self, *, drain: bool = False) -> None:
        """Close the rule and the exchange."""
        if drain:
            self._exchange.drain()
        self._rule.close()
        self._exchange.close()

    def _open(self) -> None:
        """Make the memory free for this step, and send the running statistics of its forward."""
        self._wait_for_last_step()  # for what no layer has read
        if self._sent and self._startup is not None:
            self._startup.end_startup()
            self._startup = None
        self._ended = False
        self._begin_exchange()

    def _begin_exchange(self) -> None:
        self._sent.clear()
        self._exchange.begin(self._step.scale)
        if self._statistics.flat is not None and not self.immediate:
            self._statistics.pack()
            flat = self._statistics.flat
            self._send(len(self.buckets), [flat], "running statistics")

    def _send(self, index: int, values: Sequence[Tensor | None], name: str) -> None:
        step = self._step
        operation = f"{name} in step {step.number}"
        with self._timeline.span("send", bucket=index):
            self._awaited[index] = self._exchange.send(index, values, step.weight, operation)
        sent, received = self._exchange.traffic[index]
        self._timeline.count("sent", sent)
        self._timeline.count("received", received)

    def _wait_and_install(self, bucket: Bucket) -> None:
        unit = self._rule.unit(self.buckets[self._exchange.first_to_wait_for(bucket.index)])
        self._install(unit, [value for one in unit for value in self._wait(one.index)])

    def _install(self, unit: tuple[Bucket, ...], values: Sequence[Tensor | None]) -> None:
        with self._timeline.span("update", bucket=unit[0].index):
            self._rule.update(unit, values)
        if self._exposing:
            parameters = (p for bucket in unit for p in bucket.parameters)
            for p, value in zip(parameters, values, strict=True):
                p.grad = None if value is None else value.clone()

    def _wait(self, index: int) -> list[Tensor | None]:
        with self._timeline.span("wait", bucket=index):
            return self._exchange.wait(index, self._awaited.pop(index))

    def _wait_for_last_step(self) -> None:
        """Wait for the sums of the last ended step, and install them."""
        for bucket in self.buckets:
            self.before_read(bucket)
