"""State of the exchange by puts: the groups of ranks, and each bucket's memory and version.

What a step needs of the layout is computed here once: a step looks up slices, offsets and views.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.codecs.codec import Piece
from paceline.comm.window import Window
from paceline.reduce.buckets import like
from paceline.reduce.put_engine.error_feedback import ErrorFeedback
from paceline.reduce.put_engine.gradient_views import Flags, GradientViews, LocalGradients
from paceline.reduce.put_engine.layout import (
    CONTRIBUTION,
    PARAMETERS,
    SUM,
    WEIGHT,
    BucketLayout,
    Layout,
)
from paceline.reduce.put_engine.zero_suppression import ZeroSuppression

Update = Callable[[Tensor], None]


class RankLayout:
    """Rank layout of an exchange: the rank's group, its local shard, and its peers.

    Args:
        layout: layout of the window.
        window: this rank's window, which also maps the memory of the ranks of its group.

    Attributes:
        rank: this rank.
        group: the number of this rank's group.
        groups: the numbers of all groups.
        group_ranks: the ranks of this rank's group.
        group_peers: the other ranks of this rank's group.
        leader: the first rank of this rank's group; its window holds the sums.
        leaders: for each group that contributes, its first rank.
        flags_sender: the rank that sends the summed flags to all leaders: the first leader, or the
            first server.
        local_shard: index of the local shard that this rank owns; None if its group has more ranks
            than local shards and this rank owns none.
        owners: the ranks of this rank's group that own local shards.
        peer_owners: for each other group that owns a shard of this rank's local shard, by its
            number: the rank that owns it there. Contributions are sent to these ranks.
        contributors: the ranks of other groups whose contributions to its shard this rank sums, and
            to which the sums return: the peer owners; with servers, all leaders of workers on a
            server, and none on a worker.
        contributing: the numbers of the groups whose contributions this rank sums, its own
            included; none where no other group contributes.
        servers: the servers' names, for errors, by their ranks.
        workers: all other ranks that contribute.
        peers: all other ranks; on a server, the workers alone.
    """

    def __init__(self, layout: Layout, window: Window) -> None:
        topology = layout.topology
        self.rank = window.rank
        self.group = topology.group_of(self.rank)
        self.groups = range(len(topology.groups))
        self.group_ranks = topology.groups[self.group]
        self.group_peers = [peer for peer in self.group_ranks if peer != self.rank]
        self.leader = self.group_ranks[0]
        self.leaders = tuple(topology.groups[number][0] for number in topology.contributing)
        local = self.group_ranks.index(self.rank)
        self.local_shard = local if local < topology.local_shards else None
        self.owners = self.group_ranks[: topology.local_shards]
        others = {
            number: group[self.local_shard]
            for number, group in enumerate(topology.groups)
            if self.local_shard is not None and number != self.group
        }
        owning = topology.owning if self.group in topology.contributing else ()
        contributing = topology.contributing if self.group in topology.owning else ()
        self.peer_owners = {number: rank for number, rank in others.items() if number in owning}
        self.contributors = [rank for number, rank in others.items() if number in contributing]
        self.contributing = contributing if self.contributors else ()
        self.flags_sender = topology.owners[0]
        self.servers = dict(zip(topology.owners, topology.servers, strict=False))
        self.workers = [rank for rank in topology.contributors if rank != self.rank]
        serves = self.rank in self.servers
        connected = topology.contributors if serves else topology.ranks
        self.peers = [rank for rank in connected if rank != self.rank]
        self._memory = {peer: _memory(window, peer) for peer in self.group_ranks}

    def bytes_of(self, rank: int, offset: int, size: int) -> Tensor:
        """View bytes of the window of a rank of this group, (size,)."""
        return self._memory[rank][offset : offset + size]

    def receive_buffer(
        self, rank: int, offset: int, size: int, bucket: BucketLayout
    ) -> ReceiveBuffer:
        """View the receive buffer of a contribution of so many bytes in a rank's window."""
        memory = self.bytes_of(rank, offset, bucket.spec.header_size + size)
        return ReceiveBuffer(memory, bucket.spec.header_size, len(bucket.spec.lengths))


def _memory(window: Window, peer: int) -> Tensor:
    if peer == window.rank:
        return window.memory
    memory = window.peer_memory(peer)
    assert memory is not None, f"rank {peer} is not in the shared-memory group of {window.rank}"
    return memory


class ReceiveBuffer:
    """Buffer of one contribution: a header and a payload.

    Args:
        memory: (header_size + size,), bytes of a window.
        header_size: size of the header in bytes.
        parameters: number of parameters of the bucket; the header has one flag for each.

    Attributes:
        flags: (parameters,), flags of the ranks whose gradients are in the contribution.
        payload: (size,), what is received behind the header: the values as bytes, or a payload of
            `ZeroSuppression`.
        values: (size,), the values as bytes. Where zeros are suppressed, they are
            (size - PREAMBLE,) bytes that `ZeroSuppression.restore` returned.
    """

    def __init__(self, memory: Tensor, header_size: int, parameters: int) -> None:
        self._weight = memory[:WEIGHT].numpy().view(np.float64)
        self.flags: Flags = memory[WEIGHT : WEIGHT + parameters].numpy()
        self.values = self.payload = memory[header_size:]

    @property
    def weight(self) -> float:
        """What the values are still to be multiplied by."""
        return float(self._weight[0])

    def write_header(self, weight: float, flags: Flags) -> None:
        """Write the weight and the flags."""
        self._weight[0] = weight
        self.flags[:] = flags


class BucketStates:
    """States of all buckets on one rank.

    Args:
        layout, rank_layout: of the window and of this rank.
        templates, names: for each bucket, as of `BucketState`.

    Attributes:
        slots: for each bucket, the states of its slots.
        first: for each bucket, the state of its first slot.
    """

    def __init__(
        self,
        layout: Layout,
        rank_layout: RankLayout,
        templates: Sequence[Sequence[Tensor]],
        names: Sequence[Sequence[str]],
    ) -> None:
        self.slots = [
            [BucketState(slot, rank_layout, tensors, texts) for slot in slots]
            for slots, tensors, texts in zip(layout.slots, templates, names, strict=True)
        ]
        self.first = [slots[0] for slots in self.slots]

    def at(self, index: int, version: int) -> BucketState:
        """Return the state of a bucket's version."""
        slots = self.slots[index]
        return slots[version % len(slots)]


class BucketState:
    """State of one slot of a bucket on one rank: memory, receive buffers, and the version there.

    Args:
        layout: layout of the slot.
        rank_layout: layout of this rank.
        templates: tensors of the parameters' shapes and strides.
        names: the parameters' names, for errors.

    Attributes:
        index: the bucket's number.
        gradient_views: views a step's gradients as pieces.
        sums: (numel,), the sums of all values, in the group's shared memory.
        views: views of `sums`, one per parameter.
        used: (parameters,), flags of all ranks, in the group's shared memory; written only if some
            rank has no gradient for some parameter.
        used_at: offset of `used` in a leader's window, in bytes.
        direct_return: whether the other owners put their sums directly into `sums`, without a
            receive buffer.
        defers_return: whether the owner returns the sums only when the caller allows it. If True,
            the owner may return updated parameters in their place.
        contribution: this rank's contribution in its own window; None if it is alone in its group.
        to_owners: for each other owner of the group: its rank, the range of its local shard, and
            the values of this rank's contribution to it.
        shard: the range of this rank's shard, and its sums; None if this rank owns no local shard.
            If it is None, the attributes from `own_sums` to `returned` don't exist.
        own_sums: (values,), the sums of this rank's shard.
        local_shard: the range of this rank's local shard.
        own_shard: the range of this rank's shard, relative to the start of the local shard.
        to_groups: for each other group: its number, the owner in it, and the range of its shard,
            relative to the start of the local shard.
        from_group_ranks: for each rank of the group, in rank order, its contribution to the local
            shard, in that rank's window; None for this rank. Empty if the group has one rank.
        codec: codec of contributions from other groups; None: they are unencoded.
        from_groups: for each contributing group, in order, the receive buffer of its contribution
            to the shard; None for this group. Empty if no other group contributes.
        contributed_at: offset of this group's contribution in the other owners' windows, in bytes;
            doesn't exist if there are none.
        returned_at: offset of this shard's sums in the contributors' windows, in bytes; doesn't
            exist if there are none.
        returned: for each other group: the sums of its shard, the receive buffer for them as
            bytes, and a view of it as values. The view is empty where only encoded sums or payloads
            of `ZeroSuppression` are received. There is no entry if `direct_return`.
        feedback: error feedback, which encodes what is sent to other groups; None without a codec.
        suppression: leaves out zeros of contributions to other groups; None: all is sent.
        sum_suppression: does so of sums; None: all is sent.
        local_gradients: this rank's gradients in the version; None once it is waited for.
        gathered: pieces of the group's contribution to the local shard.
        weight: factor by which the values of `gathered` must still be multiplied.
        flags: flags of the ranks of this group; after the sum over groups, flags of all ranks.
        returns: the kind of notification by which owners return the version: sums, or parameters.
        update: replaces the shard's sums by updated parameters, given the sums, (values,), of which
            nothing is needed where `empty`; None if the sums are sent back, or other owners update.
        group_dtype: dtype of unencoded contributions to other groups.
        operation: description of the version, for errors.
        wide: whether the owner sums in float32, when it returns the version; until then
            `gathered` and `weight` are those of this rank, or of its group where there are others.
        empty: True if the version carries no gradients, because `update` already has this shard's
            gradient sums.
    """

    def __init__(
        self,
        layout: BucketLayout,
        rank_layout: RankLayout,
        templates: Sequence[Tensor],
        names: Sequence[str],
    ) -> None:
        spec = layout.spec
        self.index = layout.index
        self.defers_return = spec.returns_parameters
        self.wide = spec.wide
        self.group_dtype = spec.group_dtype or spec.dtype
        self._header_size = spec.header_size
        self.direct_return = layout.returned_sums.count == 0
        self.contribution: ReceiveBuffer | None = None
        values = None
        if rank_layout.group_peers:
            self.contribution = _contribution(layout, rank_layout, rank_layout.rank)
            values = self.contribution.values
        self.gradient_views = GradientViews(layout, templates, names, values)
        sums = rank_layout.bytes_of(
            rank_layout.leader, layout.sums, layout.numel * spec.dtype.itemsize
        )
        self.sums = sums.view(spec.dtype)
        split = torch.split(self.sums, list(spec.lengths))
        self.views = [like(t, flat) for t, flat in zip(templates, split, strict=True)]
        self.used: Flags = rank_layout.bytes_of(
            rank_layout.leader, layout.flags, len(spec.lengths)
        ).numpy()
        self.used_at = layout.flags
        self.to_owners = [
            (owner, shard, values.view(spec.dtype)[shard])
            for number, owner in enumerate(rank_layout.owners)
            if owner != rank_layout.rank and values is not None
            for shard in [layout.local_shard(number)]
        ]
        self.feedback: ErrorFeedback | None = None
        self.suppression: ZeroSuppression | None = None
        self.sum_suppression: ZeroSuppression | None = None
        self.shard: tuple[slice, Tensor] | None = None
        if rank_layout.local_shard is not None:
            self._view_shards(layout, rank_layout, rank_layout.local_shard)
        self.returns = SUM
        self.update: Update | None = None
        self.empty = False
        self.operation = ""
        self.local_gradients: LocalGradients | None = None
        self.gathered: Sequence[Piece] = ()
        self.weight = 1.0
        self.flags: Flags | None = None

    def let_return(self, update: Update | None, *, parameters: bool) -> None:
        """Note what the version returns: sums, or parameters, which `update` makes of them here."""
        self.update = update
        self.returns = PARAMETERS if parameters else SUM

    def _view_shards(self, layout: BucketLayout, ranks: RankLayout, local_shard: int) -> None:
        spec = layout.spec
        rank = ranks.rank
        group = ranks.group
        self.local_shard = layout.local_shard(local_shard)
        shards = [layout.shard(local_shard, number) for number in ranks.groups]
        first = self.local_shard.start
        own = shards[group]
        within = [slice(shard.start - first, shard.stop - first) for shard in shards]
        self.own_sums = self.sums[own]
        self.shard = own, self.own_sums
        self.own_shard = within[group]
        self.to_groups = [(n, owner, within[n]) for n, owner in ranks.peer_owners.items()]
        self.from_group_ranks: list[ReceiveBuffer | None] = [
            None if peer == rank else _contribution(layout, ranks, peer, self.local_shard)
            for peer in ranks.group_ranks
            if ranks.group_peers
        ]
        size = spec.contribution_size(own.stop - own.start)
        self.codec = spec.codec
        self.from_groups: list[ReceiveBuffer | None] = [
            None if n == group else ranks.receive_buffer(rank, layout.from_groups[n], size, layout)
            for n in ranks.contributing
        ]
        if ranks.contributors:
            in_sums = layout.sums + own.start * spec.dtype.itemsize
            self.returned_at = in_sums if self.direct_return else layout.returned_sums[group]
        if ranks.peer_owners:
            self.contributed_at = layout.from_groups[group]
            if spec.codec is not None:
                self.feedback = ErrorFeedback(layout, local_shard, group)
        if spec.suppresses_zeros and (ranks.peer_owners or ranks.contributors):
            self.suppression = ZeroSuppression(len(self.to_groups))
            self.sum_suppression = self.suppression if spec.suppresses_sums else None
        receives_values = self.defers_return or (spec.codec is None and not spec.suppresses_sums)
        self.returned = [
            (sums, received, plain.view(spec.dtype))
            for n in (() if self.direct_return else ranks.peer_owners)
            for sums, offset in [(self.sums[shards[n]], layout.returned_sums[n])]
            for received in [ranks.bytes_of(rank, offset, spec.sum_size(len(sums)))]
            for plain in [ranks.bytes_of(rank, offset, sums.nbytes if receives_values else 0)]
        ]

    def header(self, weight: float, flags: Flags) -> Tensor:
        """Make a contribution's header, (bytes,)."""
        header = np.zeros(self._header_size, np.uint8)
        header[:WEIGHT].view(np.float64)[0] = weight
        header[WEIGHT : WEIGHT + len(flags)] = flags
        return torch.from_numpy(header)

    def restore_contributions(self, suppression: ZeroSuppression) -> None:
        """Restore what the other groups' contributions left out, as `values` of their buffers."""
        for group, buffer in enumerate(self.from_groups):
            if buffer is not None:
                buffer.values = suppression.restore(CONTRIBUTION, group, buffer.payload)

    def restored_sums(self, suppression: ZeroSuppression) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Restore what the other groups' sums left out.

        Returns:
            entries like those of `returned`, with restored bytes in place of received ones.
        """
        restored = []
        for (group, *_), (sums, payload, _) in zip(self.to_groups, self.returned, strict=True):
            data = suppression.restore(SUM, group, payload)
            plain = data if self.feedback is not None else data.view(sums.dtype)
            restored.append((sums, data, plain))
        return restored


def _contribution(
    layout: BucketLayout, ranks: RankLayout, rank: int, shard: slice | None = None
) -> ReceiveBuffer:
    """View a rank's contribution in its window; the values, of a local shard alone if given."""
    item = layout.spec.dtype.itemsize
    buffer = ranks.receive_buffer(rank, layout.contribution[0], layout.numel * item, layout)
    if shard is not None:
        buffer.values = buffer.values[shard.start * item : shard.stop * item]
    return buffer
