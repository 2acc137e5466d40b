"""Updates of a rank's shards (ZeRO-1): torch's optimizer over the fragments of parameters in them.

A rank holds the optimizer's state of its own fragments, 1/N of the whole; `gather` assembles the
whole state on rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.reduce.buckets import Bucket
from paceline.reduce.rank_state import Ranges, same_ranges
from paceline.update.divided_optimizer import (
    DividedOptimizer,
    Division,
    cut_state,
    flat_as,
    flat_of,
)
from paceline.update.owned_shards import OwnedShards
from paceline.update.state_entries import restore_entries
from paceline.update.updater import StepHyperparameters

SHARDED = Division(
    flag="{--update} sharded",
    argument="update='sharded'",
    where="other ranks own",
    other_flag="{--update} replicated",
    other_argument="update='replicated'",
)


class ShardOptimizer(DividedOptimizer):
    """Sharded optimizer: updates this rank's shard of each bucket (ZeRO-1).

    Args:
        optimizer: the user's optimizer, whose class and hyperparameters the updates use.

    Raises:
        ConfigError: as `DividedOptimizer`.
    """

    def __init__(self, optimizer: Optimizer, buckets: Sequence[Bucket]) -> None:
        super().__init__(optimizer, buckets, SHARDED)
        self._shards = OwnedShards()
        self._memory: dict[int, Tensor] = {}  # of the shards' sums, by bucket

    def add_shard(self, index: int, shard: slice, memory: Tensor) -> None:
        """Take a bucket's shard: the range of its values, and the memory of its sums, (values,)."""
        bucket = self._buckets[index]
        lengths = [p.numel() for p in bucket.parameters]
        self._memory[index] = memory
        self._shards.add(index, bucket.names, lengths, shard, memory)
        self._shards.optimize(index, self._optimizer, bucket.param_group)
        self._shards.release(index)

    def _take(self, state: Mapping[Tensor, Any]) -> None:
        for index, fragments in self._shards.fragments.items():
            for fragment in fragments:
                p = self._buckets[index].parameters[fragment.range.index]
                own = cut_state(state.get(p, {}), p, fragment.range.start, fragment.range.stop)
                self._shards.state[fragment.values] = own

    def freeze(self) -> StepHyperparameters:
        """Take the optimizer's present hyperparameters for the updates to come."""
        hyperparameters = super().freeze()
        for index in self._shards.fragments:
            self._shards.freeze(index, hyperparameters)
        return hyperparameters

    def copy_gradients(self, index: int) -> list[Tensor | None]:
        """Copy the present gradients of a bucket's fragments, to be given to `update`."""
        gradients: list[Tensor | None] = []
        for fragment in self._shards.fragments.get(index, ()):
            p = self._buckets[index].parameters[fragment.range.index]
            whole = None if p.grad is None else flat_as(p, p.grad)
            inside = slice(fragment.range.start, fragment.range.stop)
            gradients.append(None if whole is None else whole[inside])
        return gradients

    def update(
        self, index: int, used: Sequence[int], given: Sequence[Tensor | None] | None
    ) -> None:
        """Replace the sums of this rank's shard by updated parameters.

        Args:
            index: the bucket's index.
            used: (parameters,), 0 where no rank used one, if the gradients are the sums.
            given: gradients to use in place of the sums, one a fragment.
        """
        # The model has the parameters: a copy is there during the update only.
        self._shards.allocate(index)
        with torch.no_grad():
            for fragment in self._shards.fragments[index]:
                # Anew in each step: a script may have written the parameter since the last one.
                p = self._buckets[index].parameters[fragment.range.index]
                fragment.values.copy_(flat_of(p)[fragment.range.start : fragment.range.stop])
        self._shards.update(index, self._memory[index], used, given)
        self._shards.release(index)

    def local(self) -> Ranges:
        """Return this rank's shards of the state: (start, stop, state) of each parameter."""
        return self._shards.local()

    def restore_local(self, saved: Ranges) -> bool:
        """Take copies of what `local` returned, if this rank has the same shards."""
        if not same_ranges(self.local(), saved):
            return False
        for index, fragments in self._shards.fragments.items():
            for fragment in fragments:
                group = self._optimizer.param_groups[self._buckets[index].param_group]
                state = self._shards.state[fragment.values]
                restore_entries(state, saved[fragment.name][2], fragment.values, group)
        return True
