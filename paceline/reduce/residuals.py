"""Residuals of lossy codecs in a checkpoint: by parameter, for each machine that sends.

    {"scale": 1.0, "missed": [ {"fc.weight": (10, 512), …} of group 0, {…} of group 1, … ],
     "bucket_mb": 4.0}

For a value that a group doesn't own, it is what the group's own gradients still lack at the owner;
for one that it owns, what the sum still lacks at the others. Both are parts of the sum. So in a
world of another number of groups the owners add the total to their next sums. The bits of a lossy
exchange depend on who owns a value, and so on the bucket size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from paceline.comm.communicator import Communicator
from paceline.reduce.buckets import like
from paceline.reduce.put_engine.error_feedback import ErrorFeedback
from paceline.reduce.put_engine.layout import BucketLayout, Topology
from paceline.reduce.rank_state import (
    BUCKET_MB,
    MISSED,
    agreed,
    gather_parts,
    join_ranges,
    same_ranges,
)


@dataclass(frozen=True, kw_only=True)
class EncodedBucket:
    """Bucket that a codec encodes.

    Attributes:
        templates: tensors of the parameters' shapes and strides.
        names: the parameters' names.
        feedback: this rank's error feedback; None if the rank owns no local shard.
    """

    layout: BucketLayout
    templates: Sequence[Tensor]
    names: Sequence[str]
    feedback: ErrorFeedback | None

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """View the bucket's values, (numel,), by parameter."""
        ends = list(accumulate(self.layout.spec.lengths))
        parts = zip(self.names, self.templates, [0, *ends], ends, strict=False)
        return {name: like(template, flat[a:b]) for name, template, a, b in parts}

    def ranges(self, feedback: ErrorFeedback, flat: Tensor) -> dict[str, tuple[int, int, Tensor]]:
        """View the values of the local shard, by parameter, as (start, stop, values)."""
        ends = list(accumulate(self.layout.spec.lengths))
        shard = feedback.values
        found = {}
        for name, first, last in zip(self.names, [0, *ends], ends, strict=False):
            start = max(first, shard.start)
            stop = min(last, shard.stop)
            if start < stop:
                values = flat[start - shard.start : stop - shard.start]
                found[name] = (start - first, stop - first, values)
        return found


class Residuals:
    """Rank state of lossy codecs: this rank's residuals; a checkpoint holds those of all ranks.

    Args:
        buckets: the buckets that a codec encodes.
        topology: the groups of ranks.
        rank: this rank.
        bucket_mb: bucket size in MiB, for the checkpoint.
    """

    scaled = True
    divides_optimizer = False
    masters = None

    def __init__(
        self,
        buckets: Sequence[EncodedBucket],
        topology: Topology,
        rank: int,
        bucket_mb: float = 0.0,
    ) -> None:
        self._buckets = buckets
        self._topology = topology
        self._rank = rank
        self._bucket_mb = bucket_mb

    def gather(self, communicator: Communicator) -> Mapping[str, Any] | None:
        """Return all ranks' residuals, by parameter and group, on rank 0."""
        what = "the gather of the error-feedback residuals (collective: all ranks must call it)"
        part = self._part(lambda feedback: feedback.residual)
        parts = gather_parts(communicator, part, what)
        return self.combine(parts) if parts else None

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Take the residuals of this rank's group, or of its shard those of all groups."""
        groups: Sequence[Mapping[str, Tensor]] = state[MISSED]
        same = len(groups) == len(self._topology.groups)
        for bucket in self._buckets:
            if bucket.feedback is None:
                continue
            own = self._topology.group_of(self._rank)
            flat = torch.zeros(bucket.layout.numel, dtype=torch.float32)
            for name, view in bucket.views(flat).items():
                for residual in [groups[own]] if same else groups:
                    if name in residual and residual[name].shape == view.shape:
                        view.add_(residual[name])
            bucket.feedback.restore(flat, state["scale"], owned_by=None if same else own)
        return True

    def local(self, *, in_step: bool = True) -> Mapping[str, Any]:
        """Return the residuals of this rank's local shards, whose they are, and of which version.

        A parameter's entry is (start, stop, residual): a range of its values, in the order in which
        they lie in memory, and (stop - start,) float32.
        """
        if in_step:
            return self._part(lambda feedback: feedback.step_residual)
        return self._part(lambda feedback: feedback.residual)

    def restore_local(self, state: Mapping[str, Any]) -> bool:
        """Take the residuals, if this rank has the same local shards in the same groups."""
        flats = [torch.zeros(bucket.layout.numel) for bucket, _ in self._own()]
        own: dict[str, tuple[int, int, Tensor]] = {}
        for (bucket, feedback), flat in zip(self._own(), flats, strict=True):
            own |= bucket.ranges(feedback, flat[feedback.values])
        saved: Mapping[str, tuple[int, int, Tensor]] = state.get(MISSED, {})
        if state.get("layout") != self._place or not same_ranges(own, saved):
            return False
        for name, (*_, values) in own.items():
            values.copy_(saved[name][2])
        for (_, feedback), flat in zip(self._own(), flats, strict=True):
            feedback.restore(flat, state["scale"], owned_by=None)
        return True

    def combine(self, parts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Combine the residuals of all ranks, by parameter and group.

        In a world of one group no rank has residuals, and a part has none.
        """
        lossy = [part for part in parts if MISSED in part]
        if not lossy:
            return {"scale": 1.0, MISSED: [], BUCKET_MB: self._bucket_mb}
        owners = [part for part in lossy if part[MISSED]]
        scale, _, groups = agreed((p["scale"], p["version"], p["layout"][0]) for p in owners)
        merged = []
        for group in groups:
            own = [
                {name: (a, b, {MISSED: values}) for name, (a, b, values) in part[MISSED].items()}
                for part in owners
                if part["layout"][1] in group
            ]
            merged.append(
                {
                    name: join_ranges(name, template, own)[MISSED]
                    for bucket in self._buckets
                    for name, template in zip(bucket.names, bucket.templates, strict=True)
                    if template.numel()
                }
            )
        return {"scale": scale, MISSED: merged, BUCKET_MB: self._bucket_mb}

    def _part(self, residual_of: Callable[[ErrorFeedback], Tensor]) -> dict[str, Any]:
        """Return this rank's part: one residual of each of its local shards."""
        found: dict[str, tuple[int, int, Tensor]] = {}
        scale = 1.0
        version = 0
        for bucket, feedback in self._own():
            found |= bucket.ranges(feedback, residual_of(feedback))
            scale = feedback.scale
            version = feedback.version
        return {"scale": scale, "version": version, "layout": self._place, MISSED: found}

    @property
    def _place(self) -> tuple[Any, ...]:
        """The groups of ranks, and this rank: which shards its residuals belong to."""
        return self._topology.groups, self._rank

    def _own(self) -> list[tuple[EncodedBucket, ErrorFeedback]]:
        """List the buckets of which this rank encodes a local shard."""
        return [(one, one.feedback) for one in self._buckets if one.feedback is not None]
