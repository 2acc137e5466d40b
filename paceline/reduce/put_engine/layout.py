"""Where everything lies in a rank's window, a pure function of the runs' sizes and the topology.

A *run* is what is exchanged at once: a bucket's gradients, or the running statistics. Ranks that
share memory (those of a machine) form a *group*, and add up among themselves first:

    run      [ slice of channel 0                  | slice of channel 1                  | … ]
    slice    [ shard of group 0 | shard of group 1 | shard of group 0 | shard of group 1 | … ]

Rank c of a group owns channel c: it adds up what its group has of that slice. Among the owners of a
channel, one a group, each owns one shard: it adds up what the groups have of it. With one rank a
group that is one level: a run has one slice, and as many shards as there are ranks.

In a window there is room for

    local   what each rank of the group has of the slice
    cross   what each group has of the shard, as it travels
    back    what each group's owner has made of its shard, where it doesn't land in `sums` at once
    sums    the whole run, in the window of the group's first rank; all its ranks read it there
    flags   which parameters anybody used, behind it

Parts begin with a head: the weight (float64) that they are yet to be multiplied by, and a flag for
each parameter. Notification i of a peer tells of its part of run i, `buckets + i` of a sum,
`2 buckets + i` of flags, and the last one of the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from paceline.codecs.codecs import Codec

_ALIGN = 64  # bytes, a cache line
WEIGHT = 8  # bytes


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Who shares memory with whom.

    Attributes:
        groups: ranks in rank order, each in one group at most; who is in none takes no part.
    """

    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def flat(cls, world_size: int) -> Topology:
        """Everybody is alone."""
        return cls(groups=tuple((rank,) for rank in range(world_size)))

    @classmethod
    def of(cls, machines: Sequence[int]) -> Topology:
        """Machines with so many ranks each."""
        ends = [sum(machines[: number + 1]) for number in range(len(machines))]
        spans = zip([0, *ends], ends, strict=False)
        return cls(groups=tuple(tuple(range(a, b)) for a, b in spans))

    @property
    def leaders(self) -> Topology:
        """The first rank of each group, alone; the others are in no group."""
        return Topology(groups=tuple((group[0],) for group in self.groups))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Who is in a group, in rank order."""
        return tuple(rank for group in self.groups for rank in group)

    @property
    def local_shards(self) -> int:
        """How many ranks of each group own something."""
        return min(len(group) for group in self.groups)

    def group_of(self, rank: int) -> int:
        """The number of a rank's group."""
        return next(number for number, group in enumerate(self.groups) if rank in group)


@dataclass(frozen=True, kw_only=True)
class BucketSpec:
    """What a run holds.

    Attributes:
        lengths: values of each parameter, in the run's order.
        dtype: of the values.
        codec: how they travel between groups; None: as they are.
        updated: updated parameters may come back, as they are, in place of sums.
    """

    lengths: tuple[int, ...]
    dtype: torch.dtype
    codec: Codec | None = None
    updated: bool = False

    def coded(self, numel: int) -> int:
        """Bytes of so many values as they travel between groups."""
        return numel * self.dtype.itemsize if self.codec is None else self.codec.size(numel)


@dataclass(frozen=True, kw_only=True)
class BufferArray:
    """Places of one size, one behind another.

    Attributes:
        at: bytes from the window's start.
        stride: bytes from one to the next.
        count: how many.
    """

    at: int
    stride: int
    count: int

    @property
    def end(self) -> int:
        """Bytes to behind the last one."""
        return self.at + self.stride * self.count

    def __getitem__(self, number: int) -> int:
        assert 0 <= number < self.count
        return self.at + number * self.stride


@dataclass(frozen=True, kw_only=True)
class BucketLayout:
    """One run's places.

    Attributes:
        index: its number.
        spec: what it holds.
        shards: (channels, groups + 1), where shards begin and end, in values.
        local, cross, back: rooms for what peers send.
        sums: bytes from the window's start to the sums.
        flags: bytes from the window's start to the flags.
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
        """The number of its values."""
        return self.shards[-1][-1]

    def local_shard(self, local_shard: int) -> slice:
        """The values of a channel."""
        return slice(self.shards[local_shard][0], self.shards[local_shard][-1])

    def shard(self, local_shard: int, group: int) -> slice:
        """The values that a group's owner of a channel owns."""
        return slice(self.shards[local_shard][group], self.shards[local_shard][group + 1])

    def sum_of(self, values: slice) -> int:
        """Bytes to some values' sums."""
        start: int = values.start
        return self.sums + start * self.spec.dtype.itemsize

    @property
    def head(self) -> int:
        """Bytes of a part's head."""
        return aligned(WEIGHT + len(self.spec.lengths))


@dataclass(frozen=True, kw_only=True)
class Layout:
    """All runs' places.

    Attributes:
        buckets: in their order.
        topology: of the ranks.
        size: bytes of a window.
    """

    buckets: tuple[BucketLayout, ...]
    topology: Topology
    size: int

    @property
    def notifications(self) -> int:
        """How many a peer has."""
        return 3 * len(self.buckets) + 1

    @property
    def tells(self) -> list[str]:
        """What each notification tells of, for people."""
        kinds = ("part", "sum", "flags")
        return [
            *(
                f"{kind} of bucket {bucket_layout.index}"
                for kind in kinds
                for bucket_layout in self.buckets
            ),
            "end",
        ]


def lay_out(specs: Sequence[BucketSpec], topology: Topology) -> Layout:
    """Lay runs out for the ranks of a topology."""
    buckets, at = [], 0
    for index, spec in enumerate(specs):
        bucket_layout = _lay_out_bucket(index, spec, topology, at)
        buckets.append(bucket_layout)
        at = aligned(bucket_layout.flags + len(spec.lengths))
    return Layout(buckets=tuple(buckets), topology=topology, size=at)


def _lay_out_bucket(index: int, spec: BucketSpec, topology: Topology, at: int) -> BucketLayout:
    groups, sharing = len(topology.groups), max(map(len, topology.groups))
    item, numel = spec.dtype.itemsize, sum(spec.lengths)
    slices = _cut(0, numel, topology.local_shards, item)
    shards = tuple(_cut(start, stop, groups, item) for start, stop in pairwise(slices))
    head = aligned(WEIGHT + len(spec.lengths))
    widest = max(b - a for a, b in pairwise(slices))
    coded = spec.coded(max(b - a for shard in shards for a, b in pairwise(shard)))
    passed_on = groups > 1 and (sharing > 1 or spec.codec is not None)
    local = _buffers(at, head + widest * item, sharing if sharing > 1 else 0)
    cross = _buffers(local.end, head + coded, groups if groups > 1 else 0)
    longest = max(b - a for shard in shards for a, b in pairwise(shard))
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
        flags=back.end + aligned(numel * item),
    )


def _cut(start: int, stop: int, parts: int, itemsize: int) -> tuple[int, ...]:
    """Cut values into equal parts that begin on cache lines."""
    line = _ALIGN // itemsize
    lines = (stop - start) // line
    return (*(start + line * (part * lines // parts) for part in range(parts)), stop)


def _buffers(at: int, size: int, count: int) -> BufferArray:
    return BufferArray(at=at, stride=aligned(size), count=count)


def aligned(size: int) -> int:
    """Round up to a cache line."""
    return -(-size // _ALIGN) * _ALIGN
