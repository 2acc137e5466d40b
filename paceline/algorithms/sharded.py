"""Method notified with `--update sharded` (ZeRO-1): a shard's owner updates its parameters.

    gradient_ready        put each shard to its owner: reduce-scatter
    end                   hyperparameters are frozen: owners may update
    owner                 all contributions are there: sum, update, put the parameters back:
                          all-gather
    before_read           wait for this bucket's parameters, copy them

So each rank holds 1/N of the optimizer's state. `reduce` needs sums, which return as they do with
`replicated`; each owner then updates from the gradients as the caller left them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.algorithms.data_parallel import DataParallel
from paceline.algorithms.notified import make_with_puts
from paceline.algorithms.open_exchange import PutOptions
from paceline.comm.communicator import Communicator
from paceline.reduce.buckets import Bucket
from paceline.reduce.put_engine.put_exchange import PutExchange
from paceline.reduce.rank_state import MISSED, OPTIMIZER, Masters, RankState, agreed
from paceline.update.batch_norm import RunningStatistics
from paceline.update.divided_optimizer import DividedOptimizer
from paceline.update.shard_optimizer import ShardOptimizer


def make_sharded(
    buckets: Sequence[Bucket],
    shards: ShardOptimizer,
    statistics: RunningStatistics,
    options: PutOptions,
) -> DataParallel:
    """Make a synchronizer over puts with sharded optimizer state; every rank has a window."""

    def make_rule(
        exchange: PutExchange | None, residuals: RankState | None
    ) -> tuple[ShardedUpdate, ShardedState]:
        assert exchange is not None
        masters = shards if shards.wide else None
        return ShardedUpdate(buckets, exchange, shards), ShardedState(residuals, shards, masters)

    options = replace(options, wide=shards.wide)
    return make_with_puts(buckets, statistics, options, make_rule, returns_parameters=True)


class ShardedUpdate:
    """Update rule of ZeRO-1: each rank updates its shards; updated parameters are all-gathered.

    Args:
        buckets: all buckets of parameters.
        exchange: sums the gradients of this rank's shards.
        shards: the optimizer that updates this rank's shards.
    """

    installs_sums = False

    def __init__(
        self, buckets: Sequence[Bucket], exchange: PutExchange, shards: ShardOptimizer
    ) -> None:
        self._buckets = buckets
        self._exchange = exchange
        self._shards = shards
        self.update = shards.install
        self.close = shards.close
        own = {bucket.index: exchange.shard(bucket.index) for bucket in buckets}
        shards.add_shards({index: shard for index, shard in own.items() if shard is not None})
        shards.divide_state()

    def unit(self, bucket: Bucket) -> tuple[Bucket, ...]:
        """Return the bucket alone."""
        return (bucket,)

    def return_sums(self) -> None:
        """Let the sums return without an update."""
        for bucket in self._buckets:
            self._exchange.return_sums(bucket.index, None)

    def freeze(self, *, reduced: bool, deferred: bool) -> Mapping[int, int]:
        """Freeze the hyperparameters, and let the owners update by the sums or by `.grad`."""
        self._shards.freeze()
        versions = {}
        for bucket in self._buckets:
            if reduced:
                versions[bucket.index] = self._exchange.send_empty(bucket.index)
        for bucket in self._buckets:
            given = self._shards.copy_gradients(bucket.index) if reduced else None
            self._exchange.return_sums(bucket.index, partial(self._update, bucket.index, given))
        return versions

    def _update(self, index: int, given: Sequence[Tensor | None] | None, sums: Tensor) -> None:
        """Update this rank's shard of a bucket, in the owner's thread."""
        used = () if given is not None else self._exchange.flags(index).tolist()
        with torch._C.DisableTorchFunctionSubclass():  # no script's use, which would wait for this
            self._shards.update(index, sums, used, given)


class ShardedState:
    """Rank state of divided optimizer state: this rank's part, and any error-feedback residuals."""

    divides_optimizer = True

    def __init__(
        self,
        residuals: RankState | None,
        shards: DividedOptimizer,
        masters: Masters | None = None,
    ) -> None:
        self._residuals = residuals
        self._shards = shards
        self.masters = masters

    def gather(self, communicator: Communicator) -> Mapping[str, Any] | None:
        """Return both on rank 0."""
        residual = None if self._residuals is None else self._residuals.gather(communicator)
        optimizer = self._shards.gather(communicator)
        return None if optimizer is None else {**(residual or {}), OPTIMIZER: optimizer}

    @property
    def scaled(self) -> bool:
        """Whether some of it follows the scale of the loss."""
        return self._residuals is not None

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Take both."""
        if OPTIMIZER in state:
            self._shards.load(state[OPTIMIZER]["state"])
        if self._residuals is not None and MISSED in state:
            return self._residuals.restore(state)
        return MISSED not in state

    def local(self, *, in_step: bool = True) -> Mapping[str, Any]:
        """Return both, of this rank's shards."""
        residual = None if self._residuals is None else self._residuals.local(in_step=in_step)
        version = {"updates": self._shards.update_count}
        return {**(residual or {}), **version, OPTIMIZER: self._shards.local()}

    def restore_local(self, state: Mapping[str, Any]) -> bool:
        """Take both, if this rank has the same shards."""
        if not self._shards.restore_local(state.get(OPTIMIZER, {})):
            return False
        return (
            MISSED not in state if self._residuals is None else self._residuals.restore_local(state)
        )

    def combine(self, parts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Combine both; residuals of a world that had them, in one that has none, are dropped."""
        agreed(part.get("updates") for part in parts)
        optimizer = self._shards.combine([part.get(OPTIMIZER, {}) for part in parts])
        if not any(MISSED in part for part in parts):
            return {OPTIMIZER: optimizer}
        residual = {MISSED: []} if self._residuals is None else self._residuals.combine(parts)
        return {**residual, OPTIMIZER: optimizer}
