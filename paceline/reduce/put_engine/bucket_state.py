"""One run in a rank: its memory, and how far its versions have come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.codecs.pieces import Piece
from paceline.reduce.buckets import like
from paceline.reduce.put_engine.error_feedback import ErrorFeedback
from paceline.reduce.put_engine.gradient_views import Contribution, Flags, GradientViews
from paceline.reduce.put_engine.layout import BucketLayout
from paceline.reduce.put_engine.rank_layout import RankLayout, ReceiveBuffer


class BucketState:
    """A run's memory, and what is at hand of its last version.

    Args:
        bucket_layout: its places.
        rank_layout: of this rank.
        templates: tensors of its parameters' shapes and strides.
        names: of its parameters, for errors.

    Attributes:
        bucket_layout: its places.
        sums: (numel,), all sums.
        views: of them, one a parameter.
        shard: of them, those of this rank's shard; None without one.
        to_owners: where this rank's part of a neighbour's slice goes, by rank.
        from_members: the parts of this rank's slice, in rank order; None for its own.
        from_groups: the parts of this rank's shard, in the groups' order; None for its own.
        contribution: what this rank sent.
        ours: what the group has of this rank's slice.
        weight: what `ours` is yet to be multiplied by.
        flags: of `ours`, then of the sum.
        lands: sums come to where they belong.
        feedback: of what goes to other groups, where its wire is a lossy one.
        update: makes updated parameters of a shard's sums, in their place, where those come back.
        empty: the last version exchanges no gradients: they were given to `update` before.
    """

    def __init__(
        self,
        bucket_layout: BucketLayout,
        rank_layout: RankLayout,
        templates: Sequence[Tensor],
        names: Sequence[str],
    ) -> None:
        self.bucket_layout = bucket_layout
        self.gradients = GradientViews(bucket_layout, templates, names)
        self.sums = rank_layout.sums(bucket_layout)
        parts = torch.split(self.sums, list(bucket_layout.spec.lengths))
        self.views = [
            like(t, contribution) for t, contribution in zip(templates, parts, strict=True)
        ]
        self.lands = bucket_layout.back.count == 0
        self.to_owners: dict[int, ReceiveBuffer] = {
            owner: rank_layout.local_buffer(bucket_layout, owner, rank_layout.rank)
            for owner in rank_layout.owners
            if owner != rank_layout.rank
        }
        self.shard: Tensor | None = None
        self.from_members: list[ReceiveBuffer | None] = []
        self.from_groups: list[ReceiveBuffer | None] = []
        self.feedback: ErrorFeedback | None = None
        if rank_layout.local_shard is not None:
            self.shard = self.sums[bucket_layout.shard(rank_layout.local_shard, rank_layout.group)]
            if rank_layout.group_peers:
                self.from_members = [
                    None
                    if peer == rank_layout.rank
                    else rank_layout.local_buffer(bucket_layout, rank_layout.rank, peer)
                    for peer in rank_layout.members
                ]
            if rank_layout.peer_owners and bucket_layout.spec.codec is not None:
                self.feedback = ErrorFeedback(
                    bucket_layout, rank_layout.local_shard, bucket_layout.spec.codec
                )
            if rank_layout.peer_owners:
                self.from_groups = [
                    None
                    if group == rank_layout.group
                    else rank_layout.cross_buffer(bucket_layout, group)
                    for group in rank_layout.groups
                ]
        self.update: Callable[[], None] | None = None
        self.empty = False
        self.contribution: Contribution | None = None
        self.ours: list[Piece] = []
        self.weight = 1.0
        self.flags: Flags | None = None
