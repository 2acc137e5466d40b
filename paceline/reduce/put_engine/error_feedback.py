"""Error feedback of a bucket: adds the codec's last rounding error to what machines exchange.

The residual has two sections: what the encoding of this group's contributions to other owners lost,
and what the encoding of the sums of this rank's own shard lost. It is added to the next step's
values. There are two memories: a step reads one and writes the other, and the next step swaps them,
unless the step was abandoned.

    residual    [ of group 0's shard, contributed | … | of its own shard, returned | … ]

With a decay less than 1, a residual is decay * what the encoding lost (SparseLoCo, Sarfi et al.
2025). It is decayed once, when it is written, so whichever memory a step begins with is exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.codecs.codec import Codec, Piece, encode_sum, sum_contributions
from paceline.reduce.put_engine.layout import BucketLayout


class ErrorFeedback:
    """Error feedback of one bucket: encodes this rank's local shard, and retains the residual.

    Args:
        local_shard: index of the local shard that this rank owns.
        group: the number of this rank's group.

    Attributes:
        codec: codec of contributions.
        return_codec: codec of the sums of this rank's own shard.
        data: for each group: (bytes,), the most recent encoding of its shard.
        scale: the loss scale of the last step, which also scales the residual.
        version: the number of steps that have begun, the same on all ranks.
        values: the range of the bucket's values that is the local shard.
    """

    def __init__(self, layout: BucketLayout, local_shard: int, group: int) -> None:
        spec = layout.spec
        assert spec.codec is not None
        self.codec: Codec = spec.codec
        self.return_codec = spec.codec if spec.return_codec is None else spec.return_codec
        self._error_decay = spec.error_decay
        self.scale = 1.0
        self.version = 0
        self.values = values = layout.local_shard(local_shard)
        self._residual = torch.zeros(values.stop - values.start, dtype=spec.dtype)
        self._next_residual = torch.zeros_like(self._residual)  # of the step that runs
        self._abandoned = False
        groups = range(len(layout.shards[local_shard]) - 1)
        shards = [layout.shard(local_shard, number) for number in groups]
        self._shards = [slice(s.start - values.start, s.stop - values.start) for s in shards]
        sizes = [spec.encoded_sum_size if n == group else spec.encoded_size for n in groups]
        self.data = [
            torch.zeros(size(shard.stop - shard.start), dtype=torch.uint8)
            for size, shard in zip(sizes, self._shards, strict=True)
        ]

    def encode(self, group: int, pieces: Sequence[Piece], weight: float) -> Tensor:
        """Encode the contribution to a group's shard, given in pieces; return (bytes,)."""
        before, data, after = self._memory(group)
        self.codec.encode(pieces, weight, before, data, after)
        self._decay_residual(after)
        return data

    def reduce(
        self,
        group: int,
        contributions: Sequence[Tensor | None],
        own: Sequence[Piece],
        weight: float,
        sums: Tensor,
    ) -> None:
        """Sum and encode this rank's shard; write what the other owners will decode to `sums`.

        Args:
            group: this rank's.
            contributions: of the groups, (bytes,) each, in order; None for its own.
            own: pieces of its own contribution.
            weight: what these are still to be multiplied by.
            sums: (values,), of the shard.
        """
        before, data, after = self._memory(group)
        if self.return_codec is self.codec:
            self.codec.reduce(contributions, own, weight, before, data, after, sums)
        else:
            sum_contributions(self.codec, contributions, own, weight, sums)
            encode_sum(self.return_codec, before, data, after, sums)
        self._decay_residual(after)

    def encode_sums(self, group: int, sums: Tensor) -> Tensor:
        """Encode this rank's shard, (values,), and write what the other owners decode to it."""
        before, data, after = self._memory(group)
        encode_sum(self.return_codec, before, data, after, sums)
        self._decay_residual(after)
        return data

    def complete_sums(self, group: int, sums: Tensor) -> None:
        """Add the residual of this rank's shard to its sums, (values,), which aren't encoded.

        The residual isn't zero if an earlier step, or the run before a resume, returned encoded
        sums.
        """
        shard = self._shards[group]
        sums += self._residual[shard]
        self._next_residual[shard] = 0

    def begin(self, scale: float) -> None:
        """Begin a step whose loss has a scale."""
        self.version += 1
        if not self._abandoned:
            self._residual, self._next_residual = self._next_residual, self._residual
        self._abandoned = False
        if scale != self.scale:
            self._residual *= scale / self.scale
            self.scale = scale

    def abandon(self) -> None:
        """Let the step that ends leave no trace."""
        self._abandoned = True

    @property
    def residual(self) -> Tensor:
        """What the next step begins with, (values of the local shard,)."""
        return self._residual if self._abandoned else self._next_residual

    @property
    def step_residual(self) -> Tensor:
        """What the step that runs began with, likewise; unwritten until the next `begin`."""
        return self._residual

    def restore(self, residual: Tensor, scale: float, *, owned_by: int | None) -> None:
        """Begin with the residual of a bucket, (numel,), or of the shard that a group owns."""
        taken = residual[self.values].clone()
        if owned_by is not None:
            shard = self._shards[owned_by]
            taken[: shard.start] = 0
            taken[shard.stop :] = 0
        self._residual.copy_(taken)
        self._next_residual.copy_(taken)
        self.scale = scale

    def _memory(self, group: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a shard's residual of the step before, its encoding, and its next residual."""
        shard = self._shards[group]
        return self._residual[shard], self.data[group], self._next_residual[shard]

    def _decay_residual(self, after: Tensor) -> None:
        """Decay a residual to what the next step adds."""
        if self._error_decay != 1.0:
            after *= self._error_decay
