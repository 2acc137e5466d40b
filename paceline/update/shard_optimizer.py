"""Updates of a rank's shards (ZeRO-1): torch's optimizer over the fragments of parameters in them.

With `masters`, the fragments of narrow parameters are their float32 masters, and are held between
steps (`master_weights.py`).

A rank holds the optimizer's state of its own fragments, 1/N of the whole; `gather` assembles the
whole state on rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.comm.communicator import Communicator, total
from paceline.reduce.buckets import Bucket, like
from paceline.reduce.rank_state import Ranges, same_ranges
from paceline.update.divided_optimizer import (
    DividedOptimizer,
    Division,
    cut_state,
    flat_as,
    flat_of,
)
from paceline.update.master_weights import MASTER, is_narrow, renew
from paceline.update.owned_shards import Fragment, OwnedShards
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
        masters: whether parameters of 16 bits have float32 masters.

    Attributes:
        wide: the buckets whose parameters have masters.
        parameters: these parameters, with their buckets.

    Raises:
        ConfigError: as `DividedOptimizer`.
    """

    def __init__(
        self, optimizer: Optimizer, buckets: Sequence[Bucket], *, masters: bool = False
    ) -> None:
        super().__init__(optimizer, buckets, SHARDED)
        self._shards = OwnedShards()
        self._memory: dict[int, Tensor] = {}  # of the shards' sums, by bucket
        narrow = [b.index for b in buckets if b.parameters and is_narrow(b.parameters[0])]
        self.wide = frozenset(narrow if masters else ())
        self.parameters: dict[Tensor, int] = {
            p: index for index in self.wide for p in buckets[index].parameters
        }

    def add_shards(self, shards: Mapping[int, tuple[slice, Tensor]]) -> None:
        """Take buckets' shards, by bucket: the range of its values, and the memory of its sums."""
        # The model has the parameters: those of all shards share the memory for an
        # update, which one thread makes bucket by bucket. Masters are nowhere else.
        longest: dict[torch.dtype, int] = {}
        for index, (_, memory) in shards.items():
            if index not in self.wide:
                longest[memory.dtype] = max(longest.get(memory.dtype, 0), len(memory))
        shared = {dtype: torch.empty(numel, dtype=dtype) for dtype, numel in longest.items()}
        for index, (shard, memory) in shards.items():
            bucket = self._buckets[index]
            lengths = [p.numel() for p in bucket.parameters]
            self._memory[index] = memory
            wide = index in self.wide
            values = torch.empty(len(memory)) if wide else shared[memory.dtype]
            self._shards.add(index, bucket.names, lengths, shard, values)
            self._shards.optimize(index, self._optimizer, bucket.param_group)
            if wide:
                self._take_present(index)

    @torch.no_grad()
    def _take_present(self, index: int, *, written: bool = False) -> None:
        """Take the present parameters of a bucket's fragments, or `written` ones alone."""
        for fragment in self._shards.fragments[index]:
            present = self._present(index, fragment)
            if written:
                renew(fragment.values, present)
            else:
                fragment.values.copy_(present)

    def _present(self, index: int, fragment: Fragment) -> Tensor:
        """Return a fragment's values in the model, (values,)."""
        p = self._buckets[index].parameters[fragment.range.index]
        return flat_of(p)[fragment.range.start : fragment.range.stop].to(fragment.values.device)

    def _take(self, state: Mapping[Tensor, Any]) -> None:
        for index, fragments in self._shards.fragments.items():
            for fragment in fragments:
                p = self._buckets[index].parameters[fragment.range.index]
                own = cut_state(state.get(p, {}), p, fragment.range.start, fragment.range.stop)
                self._shards.state[fragment.values] = self._with_master_taken(index, fragment, own)

    @torch.no_grad()
    def _with_master_taken(
        self, index: int, fragment: Fragment, entries: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Take the master out of a fragment's entries, if it is there; return the others."""
        if index in self.wide and MASTER in entries:
            fragment.values.copy_(entries[MASTER])
        return {name: value for name, value in entries.items() if name != MASTER}

    @torch.no_grad()
    def renew(self, parameter: Tensor) -> None:
        """Take this rank's part of what a script has written to a narrow parameter."""
        index = self.parameters[parameter]
        for fragment in self._shards.fragments.get(index, ()):
            if self._buckets[index].parameters[fragment.range.index] is parameter:
                renew(fragment.values, self._present(index, fragment))

    @torch.no_grad()
    def round(self, communicator: Communicator) -> None:
        """Write the rounded masters of all ranks to the narrow parameters; collective."""
        for index in sorted(self.wide):
            parameters = self._buckets[index].parameters
            lengths = [p.numel() for p in parameters]
            firsts = [0, *accumulate(lengths)]
            # Whole integers of 32 bits, which zeros are added to: each value has one owner.
            numel = firsts[-1]
            flat = torch.zeros(numel + numel % 2, dtype=parameters[0].dtype)
            for fragment in self._shards.fragments.get(index, ()):
                first = firsts[fragment.range.index]
                inside = slice(first + fragment.range.start, first + fragment.range.stop)
                flat[inside] = fragment.values
            what = "the exchange of rounded masters"
            rounded = total(communicator, flat.view(torch.int32), what).view(flat.dtype)
            for p, values in zip(parameters, rounded[:numel].split(lengths), strict=True):
                p.copy_(like(p, values))

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
            own = None if whole is None else whole[inside]
            gradients.append(own if own is None or index not in self.wide else own.float())
        return gradients

    def update(
        self,
        index: int,
        sums: Tensor,
        used: Sequence[int],
        given: Sequence[Tensor | None] | None,
    ) -> None:
        """Replace the sums of this rank's shard by updated parameters.

        Args:
            index: the bucket's index.
            sums: (values,), the sums: the memory of `add_shard`, or of a wide bucket, float32.
            used: (parameters,), 0 where no rank used one, if the gradients are the sums.
            given: gradients to use in place of the sums, one a fragment.
        """
        wide = index in self.wide
        # Anew in each step: a script may have written the parameter since the last one.
        self._take_present(index, written=wide)
        self._shards.update(index, sums, used, given)
        if wide:
            self._memory[index].copy_(sums)

    def local(self) -> Ranges:
        """Return this rank's shards of the state, and masters: (start, stop, state) by name."""
        masters = {
            fragment.name: {MASTER: fragment.values.detach()}
            for index in self.wide
            for fragment in self._shards.fragments.get(index, ())
        }
        return {
            name: (start, stop, {**state, **masters.get(name, {})})
            for name, (start, stop, state) in self._shards.local().items()
        }

    def restore_local(self, saved: Ranges) -> bool:
        """Take copies of what `local` returned, if this rank has the same shards."""
        if not same_ranges(self.local(), saved):
            return False
        for index, fragments in self._shards.fragments.items():
            for fragment in fragments:
                group = self._optimizer.param_groups[self._buckets[index].param_group]
                state = self._shards.state[fragment.values]
                entries = self._with_master_taken(index, fragment, saved[fragment.name][2])
                restore_entries(state, entries, fragment.values, group)
        return True
