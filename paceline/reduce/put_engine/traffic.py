"""How many bytes of a run travel between groups, a pure function of the layout.

What ranks of a group hand each other in shared memory isn't sent.
"""

from __future__ import annotations

from paceline.reduce.put_engine.layout import BucketLayout
from paceline.reduce.put_engine.rank_layout import RankLayout


def traffic(bucket_layout: BucketLayout, rank_layout: RankLayout) -> tuple[int, int]:
    """Return the bytes that a rank sends and receives when a run is exchanged once.

    It sends each other group that group's shard, behind a head, and gets it back added up, or
    updated; its own shard comes from each of them and goes back. Frames' heads, flags of
    parameters that not everybody used, and that sums need not be sent where `reduce` gave them
    before, aren't counted.
    """
    if rank_layout.local_shard is None:
        return 0, 0
    own = _sizes(bucket_layout, rank_layout.local_shard, rank_layout.group)
    others = [
        _sizes(bucket_layout, rank_layout.local_shard, group) for group in rank_layout.peer_owners
    ]
    sent = sum(bucket_layout.head + there for there, _ in others) + own[1] * len(others)
    received = sum(back for _, back in others) + (bucket_layout.head + own[0]) * len(others)
    return sent, received


def _sizes(bucket_layout: BucketLayout, local_shard: int, group: int) -> tuple[int, int]:
    """Return the bytes of a shard on its way to its owner, and back."""
    shard = bucket_layout.shard(local_shard, group)
    numel = shard.stop - shard.start
    coded = bucket_layout.spec.coded(numel)
    return coded, numel * bucket_layout.spec.dtype.itemsize if bucket_layout.spec.updated else coded
