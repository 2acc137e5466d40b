"""`--update sharded`: who owns a shard updates it, and parameters come back in place of sums.

    gradient_ready        put each shard to its owner
    end                   hyperparameters are frozen: owners may update
    owner's thread        all ranks' parts are there: add, update, put the parameters back
    before_read           wait for this bucket's parameters, copy them

What `reduce` asks for are sums, which come back as they do with `replicated`; each owner then
updates from the gradients as the caller left them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from paceline.algorithms.notified import Notified
from paceline.comm.communicator import Communicator
from paceline.reduce.buckets import Bucket
from paceline.reduce.rank_state import OPTIMIZER, RankState
from paceline.update.shard_optimizer import ShardOptimizer


class Sharded(Notified):
    """A synchronizer on windows whose updater has its own shards only.

    The arguments are those of `Notified`, the updater's place taken by `ShardOptimizer`.
    """

    returns_parameters = True

    def __init__(self, buckets: Any, open_window: Any, shards: ShardOptimizer, *parts: Any) -> None:
        super().__init__(buckets, open_window, shards, *parts)  # type: ignore[arg-type]
        self._shards = shards
        for bucket in self.buckets:
            if (shard := self._owner.shard(bucket.index)) is not None:
                shards.own(bucket.index, *shard)
        shards.deal()

    def reduce(self) -> None:
        """Make every `.grad` the global mean; None where nobody used the parameter."""
        self._complete()
        self._return_sums(lambda bucket: None)
        super().reduce()

    def end(self, step: int) -> None:
        """Let the owners update; what they update may be installed."""
        self._complete()
        self._shards.freeze()
        if self._reduced:
            for bucket in self.buckets:
                self._owner.send_empty(bucket.index)
                self._pending.add(bucket.index)
            self._return_sums(
                lambda bucket: partial(self._update_shard, bucket, self._shards.cut(bucket.index))
            )
        else:
            self._return_sums(lambda bucket: partial(self._update_shard, bucket, None))
        self._applied = self._ended = True

    def abandon(self, step: int) -> None:
        """Drop the step's gradients."""
        if not self._reduced:
            self._complete()
            self._return_sums(lambda bucket: None)
        super().abandon(step)

    @property
    def state(self) -> RankState | None:
        """What a lossy wire has yet to send, and the optimizer's."""
        return _State(super().state, self._shards)

    def _return_sums(self, update: Callable[[Bucket], Callable[[], None] | None]) -> None:
        for bucket in self.buckets:
            self._owner.return_sums(bucket.index, update(bucket))

    def _update_shard(self, bucket: Bucket, given: Any) -> None:
        used = () if given is not None else self._owner.flags(bucket.index).tolist()
        self._shards.update(bucket.index, used, given)

    def _install(self, bucket: Bucket) -> None:
        values = self._receive(bucket)
        with self._recorder.span("update", bucket=bucket.index):
            self._shards.install(bucket, values)

    def close(self) -> None:
        """Release the exchange and the optimizer."""
        self._shards.close()
        super().close()


class _State:
    """What ranks have, and the optimizer's state of all."""

    def __init__(self, residuals: RankState | None, shards: ShardOptimizer) -> None:
        self._residuals, self._shards = residuals, shards

    def gather(self, communicator: Communicator) -> Mapping[str, Any] | None:
        """Return both on rank 0."""
        residual = None if self._residuals is None else self._residuals.gather(communicator)
        optimizer = self._shards.gather(communicator)
        return None if optimizer is None else {**(residual or {}), OPTIMIZER: optimizer}

    @property
    def scaled(self) -> bool:
        """Whether something of it follows the loss's scale."""
        return self._residuals is not None

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Take both."""
        if OPTIMIZER in state:
            self._shards.load(state[OPTIMIZER]["state"])
        if self._residuals is not None and "missed" in state:
            return self._residuals.restore(state)
        return "missed" not in state
