"""Update rule of served parameters.

`reduce` lets the sums of a version return instead of parameters. After the script has read or
changed them in `.grad`, all workers send `.grad` in another version: worker 0 with weight 1, the
others with weight 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from paceline.algorithms.served.served_optimizer import ServedOptimizer
from paceline.reduce.buckets import Bucket
from paceline.reduce.put_engine.put_exchange import PutExchange
from paceline.update.updater import StepHyperparameters


class ServedUpdate:
    """Update rule of served parameters: servers update them; this worker installs them.

    Args:
        buckets: all buckets of parameters.
        exchange: sends gradients to the servers.
        optimizer: this worker's, whose hyperparameters the servers use.
        asynchronous: whether other workers update the parameters at any time.
    """

    installs_sums = False

    def __init__(
        self,
        buckets: Sequence[Bucket],
        exchange: PutExchange,
        optimizer: ServedOptimizer,
        *,
        asynchronous: bool,
    ) -> None:
        self._buckets = buckets
        self._exchange = exchange
        self._optimizer = optimizer
        self._asynchronous = asynchronous
        self.take_staleness = optimizer.take_staleness

    def unit(self, bucket: Bucket) -> tuple[Bucket, ...]:
        """Return the bucket alone."""
        return (bucket,)

    def return_sums(self) -> None:
        """Let the sums return without an update."""
        self._let_return(None)

    def freeze(self, *, reduced: bool, deferred: bool) -> Mapping[int, int]:
        """Freeze the hyperparameters, and let the servers update by the sums or by `.grad`."""
        step = self._optimizer.freeze()
        versions = {}
        if reduced:
            weight = 1.0 if self._optimizer.is_first else 0.0
            for bucket in self._buckets:
                gradients = [p.grad for p in bucket.parameters]
                name = f"the reduced gradients of bucket {bucket.index}"
                versions[bucket.index] = self._exchange.send(bucket.index, gradients, weight, name)
        self._let_return(step)
        return versions

    def pull(self) -> Mapping[int, int]:
        """Ask for the present parameters; return the versions that return them, by bucket."""
        for bucket in self._buckets:
            empty = [None for _ in bucket.parameters]
            self._exchange.send(bucket.index, empty, 0.0, f"the pull of bucket {bucket.index}")
        versions = {b.index: self._exchange.expect(b.index, parameters=True) for b in self._buckets}
        for version in set(versions.values()):
            # The first version brings the servers their parameters: no worker is behind these.
            behind = self._buckets if version > 1 else ()
            self._optimizer.let_return(version, None, behind, pulls=True)
        return versions

    def update(self, unit: tuple[Bucket, ...], values: Sequence[Tensor | None]) -> None:
        """Install updated parameters; raises as `ServedOptimizer.install`."""
        self._optimizer.install(unit, values)

    def close(self) -> None:
        """Remove the hooks from the optimizer."""
        self._optimizer.close()

    def _let_return(self, step: StepHyperparameters | None) -> None:
        parameters = step is not None
        versions = {self._exchange.expect(b.index, parameters=parameters) for b in self._buckets}
        if versions:
            (version,) = versions  # each exchange of a step is one of all buckets
            others = self._asynchronous and version > 1
            behind = [b for b in self._buckets if others or self._exchange.unread(b.index) > 1]
            self._optimizer.let_return(version, step, behind)
