"""A rank's place among the others, and its views of the windows' memory."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.comm.window import Window
from paceline.sync.layout import Layout, Run, Topology


class Place:
    """Whom a rank exchanges with, and where.

    Args:
        layout: of the window.
        window: the rank's; its group's memory is within its reach.

    Attributes:
        rank: its number.
        group: its group's number.
        members: the ranks of its group.
        local: its place among them.
        channel: which one it owns; None: its group has more ranks than there are channels.
        owners: its group's ranks that own channels.
        across: of the other groups, by number, the owner of its channel.
        leaders: the first rank of each group; the first of them tells flags.
    """

    def __init__(self, layout: Layout, window: Window) -> None:
        topology: Topology = layout.topology
        self.rank = window.rank
        self.group = topology.group_of(self.rank)
        self.members = topology.groups[self.group]
        self.local = self.members.index(self.rank)
        self.channel = self.local if self.local < topology.channels else None
        self.owners = self.members[: topology.channels]
        self.across = {
            number: group[self.channel]
            for number, group in enumerate(topology.groups)
            if self.channel is not None and number != self.group
        }
        self.leaders = tuple(group[0] for group in topology.groups)
        self._memory = {peer: _memory(window, peer) for peer in self.members}
        self._groups = len(topology.groups)

    @property
    def neighbours(self) -> list[int]:
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

    def sums(self, run: Run) -> Tensor:
        """The sums of a run, (numel,)."""
        return self._values(self.leader, run.sums, run, run.numel)

    def flags(self, run: Run) -> Tensor:
        """What is known of who used which parameter, (parameters,)."""
        return self._memory[self.leader][run.flags : run.flags + len(run.spec.lengths)]

    def local_room(self, run: Run, owner: int, sender: int) -> tuple[Tensor, Tensor]:
        """The head and the values of what a member has of an owner's slice."""
        values = run.channel(self.members.index(owner))
        at = run.local[self.members.index(sender)]
        head = self._memory[owner][at : at + run.head]
        return head, self._values(owner, at + run.head, run, values.stop - values.start)

    def cross_room(self, run: Run, group: int) -> tuple[Tensor, Tensor]:
        """The head and the coded values, as bytes, of what a group has of this rank's shard."""
        assert self.channel is not None
        own = run.shard(self.channel, self.group)
        at = run.cross[group]
        return self._coded(run, at, own)

    def back_room(self, run: Run, group: int) -> Tensor:
        """The coded values, as bytes, of the sums of a group's shard."""
        assert self.channel is not None
        shard = run.shard(self.channel, group)
        at = run.back[group]
        return self._memory[self.rank][at : at + run.spec.coded(shard.stop - shard.start)]

    def _coded(self, run: Run, at: int, values: slice) -> tuple[Tensor, Tensor]:
        memory = self._memory[self.rank]
        start = at + run.head
        size = run.spec.coded(values.stop - values.start)
        return memory[at:start], memory[start : start + size]

    def _values(self, peer: int, at: int, run: Run, numel: int) -> Tensor:
        dtype = run.spec.dtype
        return self._memory[peer][at : at + numel * dtype.itemsize].view(dtype)


def _memory(window: Window, peer: int) -> Tensor:
    if peer == window.rank:
        return window.memory
    memory = window.reach(peer)
    assert memory is not None, f"rank {peer} shares no memory with rank {window.rank}"
    return memory


def write_head(head: Tensor, weight: float, flags: Tensor) -> None:
    """Write a part's head, (bytes,)."""
    head[:8].view(torch.float64)[0] = weight
    head[8 : 8 + len(flags)] = flags


def read_head(head: Tensor, run: Run) -> tuple[float, Tensor]:
    """Return a part's weight and flags."""
    return head[:8].view(torch.float64).item(), head[8 : 8 + len(run.spec.lengths)]
