"""Window layout: what lies where in a rank's window, a function of buckets' sizes and topology.

The running statistics have the layout of one more bucket. Ranks that share memory (those of a
machine) form a *group*, and reduce inside it first:

    bucket        [ local shard 0                     | local shard 1                     | … ]
    local shard   [ shard of group 0 | of group 1 | … | shard of group 0 | of group 1 | … | … ]

Rank c of a group owns local shard c: it reduces its group's contributions to that slice. One owner
a group has local shard c, and each of these owns one shard of it: it reduces the groups'
contributions to that shard. With one rank a group, a bucket has one local shard, and as many
shards as there are ranks.

A window holds, for each bucket,

    contribution      this rank's contribution to the whole bucket, which the other ranks of its
                      group read in place
    from_groups       receive buffers: each group's contribution to this rank's shard, encoded
    returned_sums     receive buffers: the other groups' sums of their shards, unless these are put
                      into `sums` directly
    sums              the whole bucket, in the window of the group's first rank, which its ranks
                      read
    flags             which parameters any rank used, behind the sums

*Servers* may own all shards. They are the last ranks, each in a group of its own, and contribute
nothing:

    local shard   [ of group 0: empty | of group 1: empty | … | of server 0 | of server 1 | … ]

Sums return from them as they are, directly into `sums`. Their windows alone have `from_groups`,
behind all that they have in common with the workers' windows.

Where a rank may send k versions of a bucket ahead of the last one that it has read (bounded
staleness), each bucket has k + 1 *slots*: all this memory so many times. Version v is in slot
v mod (k + 1).

A contribution begins with a header: the weight (float64) that its values are still to be multiplied
by, and a flag for each parameter. In `contribution` the values are those of gradients, which move
there (`gradient_views.py`). A peer's notification `kind * buckets + i` announces its contribution
to bucket i, a sum of it, or flags; the last notification announces that it drains.

Where servers return updated parameters, they exchange messages with the workers besides
(`messages.py`). Each rank has a receive buffer for each peer, behind all else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import torch
from torch import Tensor

from paceline.codecs.codec import Codec

_ALIGN = 64  # bytes, a cache line
PREAMBLE = _ALIGN  # bytes: a payload's, if zeros are suppressed
WEIGHT = 8  # bytes
MESSAGE = 2**18  # bytes: a receive buffer of messages
CONTRIBUTION, SUM, FLAGS, PARAMETERS = range(4)  # kinds of notifications


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Shared-memory groups of ranks.

    Attributes:
        groups: the groups, each a sequence of ranks in rank order. A rank is in at most one group;
            a rank in none takes no part in the exchange.
        servers: names of the servers, for errors: they are the only ranks of the last groups, own
            all shards and contribute nothing. (): there are none, and all groups own shards.
    """

    groups: tuple[tuple[int, ...], ...]
    servers: tuple[str, ...] = ()

    @classmethod
    def of(cls, machines: Sequence[int]) -> Topology:
        """Return one group a machine, given the machines' numbers of ranks."""
        ends = [sum(machines[: number + 1]) for number in range(len(machines))]
        spans = zip([0, *ends], ends, strict=False)
        return cls(groups=tuple(tuple(range(a, b)) for a, b in spans))

    def served_by(self, *names: str, first: int | None = None) -> Topology:
        """Return this topology of workers with servers; `first`: their first rank, if not next."""
        first = self.ranks[-1] + 1 if first is None else first
        servers = tuple((first + number,) for number in range(len(names)))
        return Topology(groups=(*self.groups, *servers), servers=names)

    @property
    def workers(self) -> Topology:
        """The topology of the contributors."""
        return Topology(groups=tuple(self.groups[number] for number in self.contributing))

    @property
    def contributing(self) -> range:
        """The numbers of the groups whose ranks contribute."""
        return range(len(self.groups) - len(self.servers))

    @property
    def owning(self) -> range:
        """The numbers of the groups that own shards."""
        groups = range(len(self.groups))
        return groups[-len(self.servers) :]  # all of them, where there is no server

    @property
    def contributors(self) -> tuple[int, ...]:
        """The ranks that contribute, in order."""
        return self.workers.ranks

    @property
    def owners(self) -> tuple[int, ...]:
        """The ranks that own shards, in order."""
        groups = [self.groups[number] for number in self.owning]
        return tuple(rank for group in groups for rank in group[: self.local_shards])

    @property
    def leaders(self) -> Topology:
        """A topology of each group's first rank alone; the others are in no group."""
        groups = tuple((group[0],) for group in self.groups)
        return Topology(groups=groups, servers=self.servers)

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
        return_codec: codec of the sums that are sent back; None: they have that of contributions.
        error_decay: what part of a residual the next version adds to its values. 1 is error
            feedback; less is SparseLoCo's.
        returns_parameters: whether updated parameters, unencoded, may be sent back in place of sums
            (ZeRO-1).
        suppresses_zeros: whether contributions and sums that are put between groups may leave out
            blocks of zeros. They then begin with a preamble (`zero_suppression.py`). Where updated
            parameters may be sent back, what is sent back is complete.
        adopts: whether the values are gradients whose memory may be replaced by the window's.
        wide: whether values of 16 bits are summed in float32, by the owner, when it returns the
            version. Contributions then come as they are, with their weight. Needs
            `returns_parameters`.
        group_dtype: dtype of contributions to other groups without a codec, where it isn't
            `dtype`: sums of several ranks' wide values are float32.
        slots: number of versions whose contributions and sums have memory of their own: 1, and the
            staleness. More than 1 needs plain values, because residuals and suppressed zeros
            follow from one version to the next.
    """

    lengths: tuple[int, ...]
    dtype: torch.dtype
    codec: Codec | None = None
    return_codec: Codec | None = None
    error_decay: float = 1.0
    returns_parameters: bool = False
    suppresses_zeros: bool = False
    returns_plain: bool = False
    adopts: bool = False
    wide: bool = False
    group_dtype: torch.dtype | None = None
    slots: int = 1

    @property
    def header_size(self) -> int:
        """Bytes of a contribution's header."""
        return _aligned(WEIGHT + len(self.lengths))

    def encoded_size(self, numel: int) -> int:
        """Return the bytes of so many values of a contribution to another group."""
        dtype = self.group_dtype or self.dtype
        return numel * dtype.itemsize if self.codec is None else self.codec.size(numel)

    def encoded_sum_size(self, numel: int) -> int:
        """Return the bytes of so many values of sums that are sent back to another group."""
        if self.returns_plain or self.wide:
            return numel * self.dtype.itemsize
        codec = self.return_codec
        return self.encoded_size(numel) if codec is None else codec.size(numel)

    @property
    def suppresses_sums(self) -> bool:
        """Whether sums may leave out blocks of zeros."""
        return self.suppresses_zeros and not (self.returns_parameters or self.returns_plain)

    def contribution_size(self, numel: int) -> int:
        """Return the most bytes of a contribution to another group, behind its header."""
        return self.encoded_size(numel) + PREAMBLE * self.suppresses_zeros

    def sum_size(self, numel: int) -> int:
        """Return the most bytes of sums that are sent back to another group."""
        return self.encoded_sum_size(numel) + PREAMBLE * self.suppresses_sums


@dataclass(frozen=True, kw_only=True)
class BufferArray:
    """Array of equal-sized receive buffers.

    Attributes:
        offset: offset of the first buffer in the window, in bytes.
        stride: distance from one buffer to the next, in bytes.
    """

    offset: int
    stride: int
    count: int

    @property
    def end(self) -> int:
        """Offset behind the last buffer, bytes."""
        return self.offset + self.stride * self.count

    def __getitem__(self, number: int) -> int:
        assert 0 <= number < self.count
        return self.offset + number * self.stride


@dataclass(frozen=True, kw_only=True)
class BucketLayout:
    """Layout of one slot of a bucket in a window.

    Attributes:
        spec: the bucket's specification.
        shards: (local shards, groups + 1), value indices in the bucket: for each local shard, the
            boundaries of the groups' shards.
        contribution: buffer of the rank's contribution, if other ranks of its group read it.
        from_groups: receive buffers for contributions from other groups.
        returned_sums: receive buffers for returned sums.
        sums: offset of the sums in the window, in bytes.
        flags: offset of the flags in the window, in bytes.
        topology: the groups of ranks.
    """

    index: int
    spec: BucketSpec
    shards: tuple[tuple[int, ...], ...]
    contribution: BufferArray
    from_groups: BufferArray
    returned_sums: BufferArray
    sums: int
    flags: int
    topology: Topology

    @property
    def numel(self) -> int:
        """The number of values."""
        return self.shards[-1][-1]

    def worker_part(self, number: int) -> slice:
        """Return the values whose optimizer state a worker holds in snapshots, by its number."""
        workers = len(self.topology.contributors)
        bounds = _boundaries(0, self.numel, workers, self.spec.dtype.itemsize)
        return slice(bounds[number], bounds[number + 1])

    def local_shard(self, local_shard: int) -> slice:
        """Return the values of a local shard."""
        return slice(self.shards[local_shard][0], self.shards[local_shard][-1])

    def shard(self, local_shard: int, group: int) -> slice:
        """Return the values of a local shard that its owner in a group owns."""
        return slice(self.shards[local_shard][group], self.shards[local_shard][group + 1])

    def traffic(self, local_shard: int | None, group: int) -> tuple[int, int]:
        """Return the bytes that a rank sends to other groups and receives from them in a step.

        A contributor sends each other owner that owner's shard, and receives its sums or updated
        parameters; an owner receives contributions to its own shard, and sends that back. Not
        counted are frames' headers and flags of parameters that some ranks didn't use. With
        `--update sharded`, `reduce` returns sums before the updated parameters return; these sums
        aren't counted either, nor are contributions and sums that leave out zeros: see
        `ZeroSuppression.traffic`.

        Args:
            local_shard: the one that the rank owns; None: it sends nothing to other groups.
            group: the rank's.
        """
        if local_shard is None:
            return 0, 0
        sizes = [b - a for a, b in pairwise(self.shards[local_shard])]
        contributes = group in self.topology.contributing
        owns = group in self.topology.owning
        others = [sizes[n] for n in self.topology.owning if contributes and n != group]
        peers = len([n for n in self.topology.contributing if owns and n != group])
        own = sizes[group]
        sent = sum(map(self._contribution_size, others)) + peers * self._returned_size(own)
        received = sum(map(self._returned_size, others)) + peers * self._contribution_size(own)
        return sent, received

    def _contribution_size(self, numel: int) -> int:
        encoded = 0 if self.spec.suppresses_zeros else self.spec.encoded_size(numel)
        return self.spec.header_size + encoded

    def _returned_size(self, numel: int) -> int:
        spec = self.spec
        if spec.suppresses_sums:
            return 0
        if spec.returns_parameters:
            return numel * spec.dtype.itemsize
        return spec.encoded_sum_size(numel)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Layout of a window: where the memory of each bucket lies.

    Attributes:
        slots: for each bucket, in order, the layouts of its slots.
        topology: the groups of ranks.
        size: size of the window in bytes.
        server_size: size of a server's window, in bytes, if there are servers.
        to_workers: receive buffers of a worker for each server's messages, in order.
        to_servers: receive buffers of a server for each worker's messages, in order.
    """

    slots: tuple[tuple[BucketLayout, ...], ...]
    topology: Topology
    size: int
    to_workers: BufferArray
    to_servers: BufferArray
    server_size: int = 0

    @property
    def buckets(self) -> tuple[BucketLayout, ...]:
        """The layouts of the buckets' first slots."""
        return tuple(slots[0] for slots in self.slots)

    @property
    def notifications(self) -> int:
        """The number of notifications of a peer."""
        return self.draining + 1

    @property
    def message(self) -> int:
        """The notification of a part of a message; the next one acknowledges it."""
        return 4 * len(self.slots)

    @property
    def draining(self) -> int:
        """The notification of a peer that drains."""
        return 4 * len(self.slots) + (2 if self.has_messages else 0)

    @property
    def has_messages(self) -> bool:
        """Whether workers and servers exchange messages."""
        return self.to_workers.count > 0

    @property
    def notification_names(self) -> list[str]:
        """What each notification announces, for traces."""
        kinds = ("contribution", "sum", "flags", "parameters")
        messages = ["message", "acknowledgement"] if self.has_messages else []
        names = (f"{kind} of bucket {b.index}" for kind in kinds for b in self.buckets)
        return [*names, *messages, "end"]


def lay_out(specs: Sequence[BucketSpec], topology: Topology) -> Layout:
    """Lay out buckets for the ranks of a topology."""
    buckets = []  # in all slots
    offset = 0
    for index, spec in enumerate(specs):
        for _ in range(spec.slots):
            bucket = _lay_out_bucket(index, spec, topology, offset)
            buckets.append(bucket)
            offset = _aligned(bucket.flags + len(spec.lengths))
    messages = any(spec.returns_parameters for spec in specs)
    to_workers = _buffers(offset, MESSAGE, len(topology.servers) if messages else 0)
    size = to_workers.end
    end = size
    for number, bucket in enumerate(buckets if topology.servers else ()):
        spec = bucket.spec
        contribution = spec.header_size + spec.contribution_size(_longest(bucket.shards))
        from_groups = _buffers(end, contribution, len(topology.contributing))
        buckets[number] = replace(bucket, from_groups=from_groups)
        end = from_groups.end
    slots = tuple(tuple(group) for _, group in groupby(buckets, lambda bucket: bucket.index))
    to_servers = _buffers(end, MESSAGE, len(topology.contributors) if to_workers.count else 0)
    return Layout(
        slots=slots,
        topology=topology,
        size=size,
        to_workers=to_workers,
        to_servers=to_servers,
        server_size=to_servers.end,
    )


def _lay_out_bucket(index: int, spec: BucketSpec, topology: Topology, offset: int) -> BucketLayout:
    groups = len(topology.groups)
    group_size = max(map(len, topology.groups))
    served = bool(topology.servers)
    if served:
        spec = replace(spec, returns_plain=True)
    assert not spec.wide or (spec.returns_parameters and spec.codec is None and not served)
    if spec.wide and group_size > 1:
        spec = replace(spec, group_dtype=torch.float32)
    plain = spec.codec is None and not spec.suppresses_zeros
    assert spec.slots == 1 or (plain and (served or not spec.returns_parameters))
    head = spec.header_size
    item = spec.dtype.itemsize
    numel = sum(spec.lengths)
    slices = _boundaries(0, numel, topology.local_shards, item)
    if served:
        # The contributors own nothing, and each server the same part of every bucket, so that all
        # servers carry the same load.
        bounds = _boundaries(0, numel, len(topology.servers), item)
        shards: tuple[tuple[int, ...], ...] = ((0,) * len(topology.contributing) + bounds,)
    else:
        shards = tuple(_boundaries(start, stop, groups, item) for start, stop in pairwise(slices))
    longest = _longest(shards)
    among_workers = groups > 1 and not served
    needs_return_buffers = among_workers and (
        group_size > 1 or spec.codec is not None or spec.suppresses_sums
    )
    contribution = _buffers(offset, head + numel * item, 1 if group_size > 1 else 0)
    received = head + spec.contribution_size(longest)
    from_groups = _buffers(contribution.end, received, groups if among_workers else 0)
    returned = spec.sum_size(longest)
    if spec.returns_parameters:
        returned = max(returned, longest * item)
    returned_sums = _buffers(from_groups.end, returned, groups if needs_return_buffers else 0)
    return BucketLayout(
        index=index,
        spec=spec,
        shards=shards,
        contribution=contribution,
        from_groups=from_groups,
        returned_sums=returned_sums,
        sums=returned_sums.end,
        flags=returned_sums.end + _aligned(numel * item),
        topology=topology,
    )


def _boundaries(start: int, stop: int, count: int, itemsize: int) -> tuple[int, ...]:
    """Return the boundaries of equal ranges of values, which begin on cache lines."""
    line = _ALIGN // itemsize
    lines = (stop - start) // line
    return (*(start + line * (number * lines // count) for number in range(count)), stop)


def most_shards(tensors: Sequence[Tensor]) -> int:
    """Return into how many shards, none of them empty, a bucket of some tensors can be cut."""
    return max(1, sum(tensor.nbytes for tensor in tensors) // _ALIGN)


def _longest(shards: Sequence[Sequence[int]]) -> int:
    return max(b - a for shard in shards for a, b in pairwise(shard))


def _buffers(offset: int, size: int, count: int) -> BufferArray:
    return BufferArray(offset=offset, stride=_aligned(size), count=count)


def _aligned(size: int) -> int:
    """Round bytes up to a cache line."""
    return -(-size // _ALIGN) * _ALIGN
