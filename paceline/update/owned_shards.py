"""Shards that a process owns: torch's optimizer over the fragments of parameters in them.

    bucket     [ a              | b         | c                  ]
    shards     [ owner 0             | owner 1                    ]
    fragments  [ a              | b  ] [ b  | c                  ]     of one parameter each

A fragment is flat, in the order in which its parameter lies in memory.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.reduce.rank_state import Ranges, divided
from paceline.state.state_copy import copy_state
from paceline.update.updater import StepHyperparameters, SubOptimizer


@dataclass(frozen=True, kw_only=True)
class ParameterRange:
    """Range of a parameter's values that lies in a range of its bucket.

    Attributes:
        index: index of the parameter in its bucket.
        start, stop: the range, as indices in the flat parameter.
        inside: the same values, as indices in the range of the bucket.
    """

    index: int
    start: int
    stop: int
    inside: slice


def parameter_ranges(lengths: Sequence[int], part: slice) -> Iterator[ParameterRange]:
    """Cut a range of a bucket's values into ranges of its parameters, which have `lengths`."""
    ends = list(accumulate(lengths))
    for index, (first, last) in enumerate(zip([0, *ends], ends, strict=False)):
        start = max(first, part.start)
        stop = min(last, part.stop)
        if start < stop:
            yield ParameterRange(
                index=index,
                start=start - first,
                stop=stop - first,
                inside=slice(start - part.start, stop - part.start),
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class Fragment:
    """Fragment of a parameter: the range of its values that lies in a shard.

    Attributes:
        name: of the parameter.
        range: the range.
        values: (values,), as a parameter of the sub-optimizer.
    """

    name: str
    range: ParameterRange
    values: nn.Parameter


class OwnedShards:
    """Shards of buckets that this process owns and updates.

    Attributes:
        fragments: the shards' fragments, in order, by bucket.
        state: the optimizer's state of the fragments, by their `values`.
        lock: held by a thread that uses the shards, where several do.
        updates: by bucket, the number of updates so far.
        restored: how often workers that share the shards have restored the state.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.updates: Counter[int] = Counter()
        self.restored = 0
        self.fragments: dict[int, list[Fragment]] = {}
        self.state: dict[Tensor, Any] = defaultdict(dict)
        self._sub_optimizers: dict[int, SubOptimizer] = {}

    def add(
        self,
        index: int,
        names: Sequence[str],
        lengths: Sequence[int],
        shard: slice,
        values: Tensor,
    ) -> None:
        """Add a bucket's shard.

        Args:
            index: the bucket's.
            names: of its parameters.
            lengths: their numbers of values.
            shard: the range of the bucket's values.
            values: (values,), memory for its parameters; several shards may share it where only one
                is between `take_values`, or a write to the fragments, and `read`.
        """
        self.fragments[index] = [
            Fragment(
                name=names[one.index],
                range=one,
                values=nn.Parameter(values[one.inside]),
            )
            for one in parameter_ranges(lengths, shard)
        ]

    def optimize(self, index: int, optimizer: Optimizer, param_group: int) -> None:
        """Let an optimizer's class update a bucket's shard, with the options of one of its groups.

        The optimizer itself is only read.
        """
        param_groups = {fragment.values: param_group for fragment in self.fragments[index]}
        if param_groups:
            self._sub_optimizers[index] = SubOptimizer(optimizer, param_groups, self.state)

    def freeze(self, index: int, hyperparameters: StepHyperparameters) -> None:
        """Take the hyperparameters for a bucket's next update."""
        if index in self._sub_optimizers:
            self._sub_optimizers[index].freeze(hyperparameters)

    @torch.no_grad()
    def take_values(self, index: int, values: Tensor) -> None:
        """Take the present parameters of a bucket's shard, (values,)."""
        for fragment in self.fragments[index]:
            fragment.values.copy_(values[fragment.range.inside])

    def update(
        self,
        index: int,
        memory: Tensor,
        used: Sequence[int],
        given: Sequence[Tensor | None] | None = None,
    ) -> None:
        """Replace the sums of a bucket's shard by updated parameters.

        Args:
            index: the bucket's.
            memory: (values,), the sums; the parameters are written here.
            used: (parameters,), 0 where no rank used one, if the gradients are the sums.
            given: gradients to use in place of the sums, one a fragment.
        """
        self.updates[index] += 1
        fragments = self.fragments[index]
        if not fragments:
            return
        # The reduced sums came here, and the updated values leave from here, uncopied.
        views = [memory[fragment.range.inside] for fragment in fragments]
        # An unused parameter has a sum of zeros, which momentum or weight decay would turn into an
        # update; with None torch leaves it as it is on one rank.
        if given is None:
            given = [
                view if used[fragment.range.index] else None
                for fragment, view in zip(fragments, views, strict=True)
            ]
        self._sub_optimizers[index].step(given)
        self.read(index, memory)

    @torch.no_grad()
    def read(self, index: int, memory: Tensor) -> None:
        """Write the parameters of a bucket's shard to memory, (values,)."""
        for fragment in self.fragments[index]:
            memory[fragment.range.inside].copy_(fragment.values)

    def local(self) -> Ranges:
        """Return the state of the shards: (start, stop, state) of each parameter, by its name."""
        return {
            fragment.name: (fragment.range.start, fragment.range.stop, self.state[fragment.values])
            for fragment in self._each()
        }

    @torch.no_grad()
    def restore(self, parts: Sequence[Ranges]) -> None:
        """Take copies of parts of the state, each of whose ranges lies in one fragment.

        A fragment of which parts are given loses the entries that none of them has.
        """
        for fragment in self._each():
            given = [part[fragment.name] for part in parts if fragment.name in part]
            if not given:
                continue
            own = self.state[fragment.values]
            for name in own.keys() - {name for *_, entries in given for name in entries}:
                del own[name]
            for start, stop, entries in given:
                self._restore_range(fragment, start, stop, entries)

    def _restore_range(
        self, fragment: Fragment, start: int, stop: int, entries: Mapping[str, Any]
    ) -> None:
        first = fragment.range.start
        own = self.state[fragment.values]
        for name, value in entries.items():
            if not divided(value):
                own[name] = copy_state(value)
                continue
            if name not in own:
                own[name] = value.new_zeros(fragment.values.shape)
            own[name][start - first : stop - first] = value

    def _each(self) -> Iterator[Fragment]:
        """Yield all fragments."""
        for fragments in self.fragments.values():
            yield from fragments
