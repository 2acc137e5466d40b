"""Window layout: what lies where in a rank's window, a function of buckets' sizes and topology.

A *bucket* here is what is exchanged at once: a bucket's gradients, or the running statistics. Ranks
that share memory (those of a machine) form a *group*, and reduce inside it first:

    bucket        [ local shard 0                     | local shard 1                     | … ]
    local shard   [ shard of group 0 | of group 1 | … | shard of group 0 | of group 1 | … | … ]

Rank c of a group owns local shard c: it reduces its group's contributions to that slice. One owner
a group has local shard c, and each of these owns one shard of it: it reduces the groups'
contributions to that shard. With one rank a group, a bucket has one local shard, and as many
shards as there are ranks.

A window holds, for each bucket,

    local   receive buffers: each group member's contribution to this rank's local shard
    cross   receive buffers: each group's contribution to this rank's shard, encoded
    back    receive buffers: the other groups' sums of their shards, unless they land in `sums`
    sums    the whole bucket, in the window of the group's first rank, which its ranks read
    flags   which parameters any rank used, behind the sums

A contribution begins with a header: the weight (float64) that its values are still to be multiplied
by, and a flag for each parameter. A peer's notification `kind * buckets + i` announces its
contribution to bucket i, a sum of it, or flags; the last notification announces that it drains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from paceline.codecs.codec import Codec

_ALIGN = 64  # bytes, a cache line
WEIGHT = 8  # bytes
CONTRIBUTION, SUM, FLAGS = range(3)  # kinds of notifications


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Shared-memory groups of ranks.

    Attributes:
        groups: the groups, each a sequence of ranks in rank order. A rank is in at most one group;
            a rank in none takes no part in the exchange.
    """

    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, machines: Sequence[int]) -> Topology:
        """Return one group a machine, given the machines' numbers of ranks."""
        ends = [sum(machines[: number + 1]) for number in range(len(machines))]
        spans = zip([0, *ends], ends, strict=False)
        return cls(groups=tuple(tuple(range(a, b)) for a, b in spans))

    @property
    def leaders(self) -> Topology:
        """A topology of each group's first rank alone; the others are in no group."""
        return Topology(groups=tuple((group[0],) for group in self.groups))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that are in a group, in order."""
        return tuple(rank for group in self.groups for rank in group)

    @property
    def local_shards(self) -> int:
        """The number of local shards of a bucket: each group has one owner of each."""
        return min(len(group) for group in self.groups)

    def group_of(self, rank: int) -> int:
        """Return the number of a rank's group."""
        return next(number for number, group in enumerate(self.groups) if rank in group)


@dataclass(frozen=True, kw_only=True)
class BucketSpec:
    """Specification of a bucket: sizes, dtype and encoding.

    Attributes:
        lengths: for each parameter, in the bucket's order, its number of values.
        dtype: dtype of the values.
        codec: codec of the values that are sent between groups; None: they are sent unencoded.
        updated: whether updated parameters, unencoded, may be sent back in place of sums (ZeRO-1).
    """

    lengths: tuple[int, ...]
    dtype: torch.dtype
    codec: Codec | None = None
    updated: bool = False

    @property
    def head(self) -> int:
        """Bytes of a contribution's header."""
        return _aligned(WEIGHT + len(self.lengths))

    def coded(self, numel: int) -> int:
        """Return the bytes of so many values between groups."""
        return numel * self.dtype.itemsize if self.codec is None else self.codec.size(numel)


@dataclass(frozen=True, kw_only=True)
class BufferArray:
    """Array of equal-sized receive buffers.

    Attributes:
        at: offset of the first buffer in the window, in bytes.
        stride: distance from one buffer to the next, in bytes.
        count: number of buffers.
    """

    at: int
    stride: int
    count: int

    @property
    def end(self) -> int:
        """Offset behind the last buffer, bytes."""
        return self.at + self.stride * self.count

    def __getitem__(self, number: int) -> int:
        assert 0 <= number < self.count
        return self.at + number * self.stride


@dataclass(frozen=True, kw_only=True)
class BucketLayout:
    """Layout of one bucket in a window.

    Attributes:
        index: the bucket's number.
        spec: the bucket's specification.
        shards: (local shards, groups + 1), value indices in the bucket: for each local shard, the
            boundaries of the groups' shards.
        local: receive buffers for contributions from ranks of the group.
        cross: receive buffers for contributions from other groups.
        back: receive buffers for returned sums.
        sums: offset of the sums in the window, in bytes.
        flags: offset of the flags in the window, in bytes.
    """

    index: int
    spec: BucketSpec
    shards: tuple[tuple[int, ...], ...]
    local: BufferArray
    cross: BufferArray
    back: BufferArray
    sums: int
    flags: int

    @property
    def numel(self) -> int:
        """The number of values."""
        return self.shards[-1][-1]

    def local_shard(self, local_shard: int) -> slice:
        """Return the values of a local shard."""
        return slice(self.shards[local_shard][0], self.shards[local_shard][-1])

    def shard(self, local_shard: int, group: int) -> slice:
        """Return the values of a local shard that its owner in a group owns."""
        return slice(self.shards[local_shard][group], self.shards[local_shard][group + 1])

    def traffic(self, local_shard: int | None, group: int) -> tuple[int, int]:
        """Return the bytes that a rank sends to other groups and receives from them in a step.

        A rank sends each other group that group's shard, and receives its sums or updated
        parameters; the other groups send contributions to its own shard, and receive that. Not
        counted are frames' headers and flags of parameters that some ranks didn't use. With
        `--update sharded`, `reduce` returns sums before the updated parameters return; these sums
        aren't counted either.

        Args:
            local_shard: the one that the rank owns; None: it sends nothing to other groups.
            group: the rank's.
        """
        if local_shard is None:
            return 0, 0
        sizes = [b - a for a, b in pairwise(self.shards[local_shard])]
        own = sizes.pop(group)
        spec, back = self.spec, self._returned(own)
        there = spec.head + spec.coded(own)
        sent = sum(spec.head + spec.coded(size) for size in sizes) + back * len(sizes)
        return sent, sum(map(self._returned, sizes)) + there * len(sizes)

    def _returned(self, numel: int) -> int:
        spec = self.spec
        return numel * spec.dtype.itemsize if spec.updated else spec.coded(numel)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Layout of a window: where the memory of each bucket lies.

    Attributes:
        buckets: the layouts of the buckets, in order.
        topology: the groups of ranks.
        size: size of the window in bytes.
    """

    buckets: tuple[BucketLayout, ...]
    topology: Topology
    size: int

    @property
    def notifications(self) -> int:
        """The number of notifications of a peer."""
        return 3 * len(self.buckets) + 1

    @property
    def notification_names(self) -> list[str]:
        """What each notification announces, for traces."""
        kinds = ("part", "sum", "flags")
        return [*(f"{kind} of bucket {b.index}" for kind in kinds for b in self.buckets), "end"]


def lay_out(specs: Sequence[BucketSpec], topology: Topology) -> Layout:
    """Lay out buckets for the ranks of a topology."""
    buckets, at = [], 0
    for index, spec in enumerate(specs):
        bucket = _lay_out_bucket(index, spec, topology, at)
        buckets.append(bucket)
        at = _aligned(bucket.flags + len(spec.lengths))
    return Layout(buckets=tuple(buckets), topology=topology, size=at)


def _lay_out_bucket(index: int, spec: BucketSpec, topology: Topology, at: int) -> BucketLayout:
    groups, sharing = len(topology.groups), max(map(len, topology.groups))
    item, numel = spec.dtype.itemsize, sum(spec.lengths)
    slices = _cut(0, numel, topology.local_shards, item)
    shards = tuple(_cut(start, stop, groups, item) for start, stop in pairwise(slices))
    widest = max(b - a for a, b in pairwise(slices))
    longest = max(b - a for shard in shards for a, b in pairwise(shard))
    coded = spec.coded(longest)
    passed_on = groups > 1 and (sharing > 1 or spec.codec is not None)
    local = _buffers(at, spec.head + widest * item, sharing if sharing > 1 else 0)
    cross = _buffers(local.end, spec.head + coded, groups if groups > 1 else 0)
    returned = max(coded, longest * item) if spec.updated else coded
    back = _buffers(cross.end, returned, groups if passed_on else 0)
    return BucketLayout(
        index=index,
        spec=spec,
        shards=shards,
        local=local,
        cross=cross,
        back=back,
        sums=back.end,
        flags=back.end + _aligned(numel * item),
    )


def _cut(start: int, stop: int, parts: int, itemsize: int) -> tuple[int, ...]:
    """Cut values into equal parts that begin on cache lines."""
    line = _ALIGN // itemsize
    lines = (stop - start) // line
    return (*(start + line * (part * lines // parts) for part in range(parts)), stop)


def _buffers(at: int, size: int, count: int) -> BufferArray:
    return BufferArray(at=at, stride=_aligned(size), count=count)


def _aligned(size: int) -> int:
    """Round bytes up to a cache line."""
    return -(-size // _ALIGN) * _ALIGN
