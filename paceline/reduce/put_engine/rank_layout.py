"""A rank's place among the others, and its views of the windows' memory."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline.comm.window import Window
from paceline.reduce.put_engine.gradient_views import Flags
from paceline.reduce.put_engine.layout import WEIGHT, BucketLayout, Layout, Topology


class RankLayout:
    """Whom a rank exchanges with, and where.

    Args:
        layout: of the window.
        window: the rank's; its group's memory is within its reach.

    Attributes:
        rank: its number.
        group: its group's number.
        members: the ranks of its group.
        local: its place among them.
        local_shard: which one it owns; None: its group has more ranks than there are channels.
        owners: its group's ranks that own channels.
        peer_owners: of the other groups, by number, the owner of its channel.
        leaders: the first rank of each group; the first of them tells flags.
        peers: all other ranks.
    """

    def __init__(self, layout: Layout, window: Window) -> None:
        topology: Topology = layout.topology
        self.rank = window.rank
        self.group = topology.group_of(self.rank)
        self.members = topology.groups[self.group]
        self.local = self.members.index(self.rank)
        self.local_shard = self.local if self.local < topology.local_shards else None
        self.owners = self.members[: topology.local_shards]
        self.peer_owners = {
            number: group[self.local_shard]
            for number, group in enumerate(topology.groups)
            if self.local_shard is not None and number != self.group
        }
        self.leaders = tuple(group[0] for group in topology.groups)
        self.peers = [rank for rank in topology.ranks if rank != self.rank]
        self._memory = {peer: _memory(window, peer) for peer in self.members}
        self._groups = len(topology.groups)

    @property
    def group_peers(self) -> list[int]:
        """The other ranks of the group."""
        return [peer for peer in self.members if peer != self.rank]

    @property
    def leader(self) -> int:
        """The group's first rank, in whose window the sums are."""
        return self.members[0]

    @property
    def groups(self) -> range:
        """The groups' numbers."""
        return range(self._groups)

    def sums(self, bucket_layout: BucketLayout) -> Tensor:
        """The sums of a run, (numel,)."""
        return self._values(self.leader, bucket_layout.sums, bucket_layout, bucket_layout.numel)

    def flags(self, bucket_layout: BucketLayout) -> Flags:
        """What is known of who used which parameter, (parameters,)."""
        memory = self._memory[self.leader][
            bucket_layout.flags : bucket_layout.flags + len(bucket_layout.spec.lengths)
        ]
        return memory.numpy()

    def local_buffer(self, bucket_layout: BucketLayout, owner: int, sender: int) -> ReceiveBuffer:
        """Where what a member has of an owner's slice lies, in the owner's window."""
        at = bucket_layout.local[self.members.index(sender)]
        values = bucket_layout.local_shard(self.members.index(owner))
        memory = self._memory[owner]
        start = at + bucket_layout.head
        return ReceiveBuffer(
            memory[at:start], self._values(owner, start, bucket_layout, values.stop - values.start)
        )

    def cross_buffer(self, bucket_layout: BucketLayout, group: int) -> ReceiveBuffer:
        """Where what a group has of this rank's shard lies, coded."""
        assert self.local_shard is not None
        own = bucket_layout.shard(self.local_shard, self.group)
        at, memory = bucket_layout.cross[group], self._memory[self.rank]
        start = at + bucket_layout.head
        size = bucket_layout.spec.coded(own.stop - own.start)
        return ReceiveBuffer(memory[at:start], memory[start : start + size])

    def back_buffer(self, bucket_layout: BucketLayout, group: int, *, coded: bool) -> Tensor:
        """The values, as bytes, coded or as they are, that a group's owner sends back."""
        assert self.local_shard is not None
        shard = bucket_layout.shard(self.local_shard, group)
        at, numel = bucket_layout.back[group], shard.stop - shard.start
        size = (
            bucket_layout.spec.coded(numel) if coded else numel * bucket_layout.spec.dtype.itemsize
        )
        return self._memory[self.rank][at : at + size]

    def _values(self, peer: int, at: int, bucket_layout: BucketLayout, numel: int) -> Tensor:
        dtype = bucket_layout.spec.dtype
        return self._memory[peer][at : at + numel * dtype.itemsize].view(dtype)


def _memory(window: Window, peer: int) -> Tensor:
    if peer == window.rank:
        return window.memory
    memory = window.peer_memory(peer)
    assert memory is not None, f"rank {peer} shares no memory with rank {window.rank}"
    return memory


class ReceiveBuffer:
    """Where a part lies.

    Args:
        head: (bytes,), its head.
        values: behind it.
    """

    def __init__(self, head: Tensor, values: Tensor) -> None:
        self.values = values
        self._weight = head[:WEIGHT].numpy().view(np.float64)
        self._flags = head[WEIGHT:].numpy()

    def write_head(self, weight: float, flags: Flags) -> None:
        """Say what the values are yet to be multiplied by, and which parameters they are of."""
        self._weight[0] = weight
        self._flags[: len(flags)] = flags

    @property
    def weight(self) -> float:
        """What the values are yet to be multiplied by."""
        return float(self._weight[0])

    def flags(self, bucket_layout: BucketLayout) -> Flags:
        """Which parameters they are of."""
        return self._flags[: len(bucket_layout.spec.lengths)]


def head_of(bucket_layout: BucketLayout, weight: float, flags: Flags) -> Tensor:
    """Make a part's head, (bytes,)."""
    head = np.zeros(bucket_layout.head, np.uint8)
    head[:WEIGHT].view(np.float64)[0] = weight
    head[WEIGHT : WEIGHT + len(flags)] = flags
    return torch.from_numpy(head)
