"""A run's values as they travel between groups: coded by a lossy wire, or as they are.

A lossy wire keeps what it missed, of what this rank sends to the owners and of what it sends back
as one, and adds it next time. There are two memories for that: a step reads one and writes the
other, and they change places when the step has taken effect.

    missed    [ of group 0's shard, which is sent | … | of its own, which is sent back | … ]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.codecs.codecs import Codec
from paceline.codecs.pieces import Piece
from paceline.reduce.put_engine.layout import BucketLayout


class ErrorFeedback:
    """Codes a run's shards of one channel.

    Args:
        bucket_layout: whose.
        local_shard: which this rank owns.
        codec: a lossy one.

    Attributes:
        residual: (slice,), of each value what hasn't been sent yet, by the steps that took effect.
        scale: what the loss, and so what was missed, was multiplied by.
    """

    def __init__(self, bucket_layout: BucketLayout, local_shard: int, codec: Codec) -> None:
        self._codec = codec
        self.scale = 1.0
        values = bucket_layout.local_shard(local_shard)
        self._first = values.start
        self.residual = torch.zeros(values.stop - values.start, dtype=bucket_layout.spec.dtype)
        self._next_residual = torch.zeros_like(self.residual)  # of the step that runs
        groups = len(bucket_layout.shards[local_shard]) - 1
        self._shards = [bucket_layout.shard(local_shard, group) for group in range(groups)]
        self._data = [
            torch.zeros(codec.size(shard.stop - shard.start), dtype=torch.uint8)
            for shard in self._shards
        ]

    def encode(self, group: int, pieces: Sequence[Piece], weight: float) -> Tensor:
        """Code what goes to a group's owner: pieces of its shard. Returns (bytes,)."""
        place, data = self._place(group), self._data[group]
        self._codec.encode(pieces, weight, self.residual[place], data, self._next_residual[place])
        return data

    def reduce(
        self,
        group: int,
        parts: Sequence[Tensor | None],
        ours: Sequence[Piece],
        weight: float,
        sums: Tensor,
    ) -> None:
        """Add up this rank's own shard and code it; the sums are what the others will decode.

        Args:
            group: this rank's.
            parts: what the groups have sent, (bytes,) each, in their order; None for its own.
            ours: pieces of the own part.
            weight: what they are yet to be multiplied by.
            sums: (values,), of the shard.
        """
        place, data = self._place(group), self._data[group]
        residual, next_residual = self.residual[place], self._next_residual[place]
        self._codec.reduce(parts, ours, weight, residual, data, next_residual, sums)

    def coded(self, group: int) -> Tensor:
        """Return what was coded last of a group's shard, (bytes,)."""
        return self._data[group]

    def encode_sums(self, group: int, sums: Tensor) -> Tensor:
        """Code this rank's own shard, (values,), and let the sums be what the others decode."""
        data = self.encode(group, [(0, len(sums), sums)], 1.0)
        self._codec.decode(data, sums)
        return data

    def complete_sums(self, group: int, sums: Tensor) -> None:
        """Add what was missed of this rank's own shard to its sums, (values,), which aren't coded.

        It isn't sent back coded in this step, but was in an earlier one, or in another world.
        """
        place = self._place(group)
        sums += self.residual[place]
        self._next_residual[place] = 0

    def add(self, data: Tensor, sums: Tensor) -> None:
        """Add what another group has sent to sums."""
        self._codec.add(data, sums)

    def decode(self, data: Tensor, sums: Tensor) -> None:
        """Write what another group's owner has sent back."""
        self._codec.decode(data, sums)

    def begin(self, *, applied: bool, scale: float) -> None:
        """Begin a step; `applied`: the last one took effect; `scale`: of this step's loss."""
        if applied:
            self.residual, self._next_residual = self._next_residual, self.residual
        if scale != self.scale:
            self.residual *= scale / self.scale
            self.scale = scale

    def held(self, *, applied: bool) -> Tensor:
        """Return what the next step has to begin with, (slice,)."""
        return self._next_residual if applied else self.residual

    def restore(self, residual: Tensor, scale: float, *, owned_by: int | None) -> None:
        """Begin with what was missed of the run, (numel,), or of the shard that a group owns."""
        taken = residual[self._first :][: len(self.residual)].clone()
        if owned_by is not None:
            shard = self._shards[owned_by]
            taken[: shard.start - self._first] = 0
            taken[shard.stop - self._first :] = 0
        self.residual.copy_(taken)
        self._next_residual.copy_(taken)
        self.scale = scale

    def _place(self, group: int) -> slice:
        """Where a group's shard is within the slice."""
        shard = self._shards[group]
        return slice(shard.start - self._first, shard.stop - self._first)
