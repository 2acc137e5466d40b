"""Sender: puts a rank's contributions to the owners of the shards, version by version.

With k + 1 slots a bucket, a rank sends version v only after it has read version v - k - 1 of all
its sums: no rank leads by more than k versions (stale synchronous parallel; Ho et al., 2013). So
nothing is acknowledged. An owner that has version v of all contributions knows that no rank still
needs anything of version v - k - 1, in whose slot it writes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.codecs.codec import Piece, cut
from paceline.comm.window import Window
from paceline.reduce.put_engine.bucket_state import BucketState, BucketStates, RankLayout
from paceline.reduce.put_engine.gradient_views import (
    NO_GRADIENTS,
    Flags,
    LocalGradients,
    copy_past_caches,
)
from paceline.reduce.put_engine.layout import CONTRIBUTION


class Sender:
    """Sender of one rank's contributions; the owner's thread calls `put_shards`, too.

    Args:
        window: this rank's window.
        rank_layout: layout of this rank.

    Attributes:
        sent: (buckets,), for each bucket the last version that this rank has sent.
        read: (buckets,), for each bucket the last version whose sums it has read.
    """

    def __init__(self, window: Window, rank_layout: RankLayout, buckets: BucketStates) -> None:
        self._window = window
        self._ranks = rank_layout
        self._buckets = buckets
        self.sent = np.zeros(len(buckets.slots), np.int64)
        self.read = np.zeros(len(buckets.slots), np.int64)

    def send(
        self, index: int, values: Sequence[Tensor | None], weight: float, operation: str
    ) -> int:
        """Put this rank's contributions to the next version of a bucket; return the version.

        Raises:
            PeerLost: a peer ended.
        """
        version = self._next(index)
        bucket = self._buckets.at(index, version)
        bucket.operation = operation
        bucket.empty = False
        bucket.let_return(None, parameters=False)
        bucket.local_gradients = gradients = bucket.gradient_views.local_gradients(values, weight)
        if bucket.contribution is not None:
            bucket.contribution.write_header(gradients.weight, gradients.flags)
        for owner, local_shard, contribution in bucket.to_owners:
            if gradients.weight:  # otherwise no owner reads the values
                for start, stop, piece in cut(gradients.pieces, local_shard):
                    copy_past_caches(piece, contribution[start:stop])
            self._window.put(owner, 0, None, index, version, -index)
        if not self._ranks.group_peers and bucket.feedback is None:
            self.put_shards(bucket, gradients.pieces, gradients.weight, gradients.flags, version)
        self._count_sent(bucket, version)
        return version

    def send_empty(self, index: int) -> int:
        """Begin a version without gradients: owners have been given theirs; return it."""
        version = self._next(index)
        bucket = self._buckets.at(index, version)
        bucket.empty = True
        bucket.local_gradients = NO_GRADIENTS
        for owner, *_ in bucket.to_owners:
            self._window.put(owner, 0, None, index, version, -index)
        self._count_sent(bucket, version)
        return version

    def put_shards(
        self,
        bucket: BucketState,
        pieces: Sequence[Piece],
        weight: float,
        flags: Flags,
        version: int,
    ) -> None:
        """Put the group's contributions to the other groups' shards to their owners.

        The owner's thread calls it where the group's ranks are summed before, or encoded.

        Args:
            pieces: of this rank's local shard.
            weight: what these are still to be multiplied by.
            flags: of their parameters.
            version: of the bucket.
        """
        row = CONTRIBUTION * len(self._buckets.slots) + bucket.index
        for group, owner, values in bucket.to_groups:
            inside = cut(pieces, values)
            source: list[torch.Tensor]
            if bucket.feedback is None:
                values_sent = [piece.to(bucket.group_dtype) for _, _, piece in inside]
                source = [bucket.header(weight, flags), *values_sent]
                if not weight and bucket.suppression is None:
                    del source[1:]  # no owner reads them
            else:
                data = bucket.feedback.encode(group, inside, weight)
                source = [bucket.header(1.0, flags), data]
            if bucket.suppression is not None:
                source[1:] = bucket.suppression.suppress(group, source[1:])
            self._window.put(owner, bucket.contributed_at, source, row, version, -bucket.index)

    def count_read(self, bucket: BucketState, version: int) -> LocalGradients:
        """Count a version's sums as read; return this rank's gradients, and let go of them."""
        gradients = bucket.local_gradients
        bucket.local_gradients = None
        bucket.gathered = ()
        assert gradients is not None
        self.read[bucket.index] = version
        return gradients

    def _next(self, index: int) -> int:
        """Return the next version of a bucket, whose slot has been read."""
        version = int(self.sent[index]) + 1
        assert version - self.read[index] <= len(self._buckets.slots[index])
        return version

    def _count_sent(self, bucket: BucketState, version: int) -> None:
        """Count this rank's own contribution; wake the owner's thread if it waits for no other."""
        index = bucket.index
        self.sent[index] = version
        ranks = self._ranks
        awaited = ranks.group_peers or (ranks.contributors if bucket.feedback is None else ())
        if all(self._window.values[peer, index] >= version for peer in awaited):
            self._window.wake()
