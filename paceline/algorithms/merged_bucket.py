"""Bucket of values that workers average: what they were at the last merge, and their change.

own      this worker's present values, in the model
taken    the same, when the last merge began
anchor   what all workers agreed on at the last merge
change   taken - anchor, which travels
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.reduce.buckets import Bucket, like
from paceline.update.batch_norm import RunningStatistics
from paceline.update.outer.mean import Mean
from paceline.update.outer.outer_rule import OuterRule, require_merged, require_state

STATISTICS = "the running statistics"  # name of their bucket


class Values(Protocol):
    """Protocol of values of the model that are merged together, as one flat tensor.

    Attributes:
        tensors: the model's.
        names: of the tensors.
        lengths: of the tensors, in values.
    """

    tensors: Sequence[Tensor]
    names: tuple[str, ...]
    lengths: tuple[int, ...]

    def read(self, flat: Tensor) -> None:
        """Copy the model's values to `flat`, (sum of the lengths,)."""

    def write(self, flat: Tensor) -> None:
        """Copy `flat` into the model."""

    def versions(self) -> tuple[int, ...]:
        """Return numbers that change when the values are written."""


class ParameterValues:
    """Values of the parameters of one bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self.tensors: Sequence[Tensor] = bucket.parameters
        self.names = bucket.names
        self.lengths = tuple(p.numel() for p in bucket.parameters)

    @torch.no_grad()
    def read(self, flat: Tensor) -> None:
        """Copy the parameters to `flat`."""
        torch._foreach_copy_(self._views(flat), list(self.tensors))

    @torch.no_grad()
    def write(self, flat: Tensor) -> None:
        """Copy `flat` into the parameters."""
        torch._foreach_copy_(list(self.tensors), self._views(flat))

    @torch.no_grad()
    def add(self, flat: Tensor) -> None:
        """Add `flat` to the parameters."""
        torch._foreach_add_(list(self.tensors), self._views(flat))

    def versions(self) -> tuple[int, ...]:
        """Return autograd's version counters."""
        return tuple(p._version for p in self.tensors)

    def _views(self, flat: Tensor) -> list[Tensor]:
        parts = zip(self.tensors, flat.split(self.lengths), strict=True)
        return [like(p, part) for p, part in parts]


class StatisticsValues:
    """Values of the model's running statistics."""

    def __init__(self, statistics: RunningStatistics) -> None:
        assert statistics.flat is not None
        self._statistics = statistics
        self.tensors: Sequence[Tensor] = statistics.buffers
        self.names: tuple[str, ...] = (STATISTICS,)
        self.lengths: tuple[int, ...] = (statistics.flat.numel(),)

    def read(self, flat: Tensor) -> None:
        """Copy the statistics to `flat`."""
        self._statistics.pack()
        assert self._statistics.flat is not None
        flat.copy_(self._statistics.flat)

    def write(self, flat: Tensor) -> None:
        """Copy `flat` into the model."""
        self._statistics.replace(flat)

    def versions(self) -> tuple[int, ...]:
        """Return nothing: each forward writes them, in evaluation too if a script wants it."""
        return ()


def ranges_of(values: Values, written: Collection[Tensor]) -> list[tuple[int, int]]:
    """Return where tensors that were written lie in the flat form, as (start, stop)."""
    ends = accumulate((tensor.numel() for tensor in values.tensors), initial=0)
    each = zip(values.tensors, pairwise(ends), strict=True)
    return [ends_of for tensor, ends_of in each if tensor in written]


class MergedBucket:
    """Merged bucket: the anchor of the last merge, this worker's values, and their difference.

    Args:
        values: the model's.
        flat: a tensor like their flat form, (values,).
        rule: merges them.

    Attributes:
        anchor: (values,), what all workers agreed on at the last merge.
        taken: (values,), this worker's values when they were taken.
        change: (values,), taken - anchor, the negative of the outer gradient: what travels. The
            exchange reads it until the sum has arrived; `apply` overwrites it.
        outer: state of the rule, by name.
    """

    def __init__(self, values: Values, flat: Tensor, rule: OuterRule) -> None:
        self.values = values
        self._rule = rule
        self.anchor = torch.empty_like(flat)
        values.read(self.anchor)
        self.taken = self.anchor.clone()
        self.change = torch.zeros_like(self.anchor)
        self.outer = self._kept(require_state(rule, rule.begin(self.anchor), self.anchor))
        self._shown: tuple[int, ...] = ()  # versions of the shown anchor
        self._own: Tensor | None = None  # in the meantime

    @torch.no_grad()
    def take(self) -> None:
        """Take the present values, and their change."""
        self.values.read(self.taken)
        torch.sub(self.taken, self.anchor, out=self.change)

    @torch.no_grad()
    def rebase(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Make present values the anchor, and forget what the rule knows of them.

        Args:
            ranges: where they lie, (start, stop); a merge under way gets no change of them.
        """
        own = torch.empty_like(self.anchor)
        self.values.read(own)
        for start, stop in ranges:
            self.anchor[start:stop] = own[start:stop]
            self.taken[start:stop] = own[start:stop]
        new = require_state(self._rule, self._rule.begin(self.anchor), self.anchor)
        outer = {name: value.clone() for name, value in self.outer.items()}
        for name, value in outer.items():
            for start, stop in ranges:
                value[start:stop] = new[name][start:stop] if name in new else 0
        self.outer = outer

    def without_samples(self) -> Tensor:
        """Return what stands for the mean change where no worker had samples: zeros."""
        return torch.zeros_like(self.anchor)

    @torch.no_grad()
    def apply(self, sums: Tensor, *, steps: int, mix: float | None) -> None:
        """Merge.

        Args:
            sums: (values,), the weighted mean of the workers' changes.
            steps: number of steps made since the values were taken.
            mix: as of `Averaging`.
        """
        mean = torch.add(self.anchor, sums, out=self.change)  # which is summed by now
        result = self._rule.merge(self.taken, self.anchor, mean, self.outer)
        merged, anchor, state = require_merged(self._rule, result, self.anchor)
        self.outer = self._kept(state)
        if not steps:
            self.values.write(merged)
        elif isinstance(self.values, ParameterValues):  # own statistics are of newer batches
            if mix is None:
                self.values.add(torch.sub(merged, self.taken, out=self.taken))
            else:
                own = torch.empty_like(self.anchor)
                self.values.read(own)
                self.values.write(mix * own + (1 - mix) * merged)
        self.anchor.copy_(anchor)

    def _kept(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Copy what of a rule's state shares memory with its inputs, which are written again."""
        inputs = {
            one.untyped_storage().data_ptr() for one in (self.anchor, self.taken, self.change)
        }
        return {
            name: value.clone() if value.untyped_storage().data_ptr() in inputs else value
            for name, value in state.items()
        }

    def show(self) -> None:
        """Copy the anchor into the model, until `hide`."""
        own = torch.empty_like(self.anchor)
        self.values.read(own)
        self._own = own
        self.values.write(self.anchor)

    def watch(self) -> None:
        """Remember that the anchor is in the model unchanged, once all buckets are shown.

        Parameters that are views of one tensor have one version counter.
        """
        self._shown = self.values.versions()

    def check(self) -> None:
        """Require that the model wasn't written since `watch`.

        Raises:
            ConfigError: it was.
        """
        if self._shown != self.values.versions():
            raise ConfigError(
                f"{self.values.names[0]} or another parameter of its bucket was written while the "
                "model had the merged weights, after model.eval() or for a state dict. The write "
                'would be lost: with sync="average" call model.train() first.'
            )

    def hide(self) -> None:
        """Copy this worker's own values back."""
        assert self._own is not None
        self.values.write(self._own)
        self._own = None


def make_buckets(
    buckets: Sequence[Bucket], statistics: RunningStatistics, rule: OuterRule
) -> list[MergedBucket]:
    """Make what is merged of a model's buckets, and of its running statistics, which come last."""
    merged = []
    for bucket in buckets:
        numel = sum(p.numel() for p in bucket.parameters)
        first = bucket.parameters[0]
        merged.append(MergedBucket(ParameterValues(bucket), first.new_empty(numel).detach(), rule))
    if statistics.flat is not None:
        values = StatisticsValues(statistics)
        merged.append(MergedBucket(values, torch.empty_like(statistics.flat), Mean()))
    return merged
