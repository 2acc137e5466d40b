"""Owner: reduces the contributions to this rank's shards in a thread, and puts the sums back.

Each bucket passes these stages, and the thread counts how many versions have passed each:

    gathered   the group's contributions to this rank's local shard are summed, in rank order
    summed     the groups' contributions to its shard are summed, in the groups' order
    returned   the sum is put to the other owners, or the parameters updated by it (ZeRO-1)
    done       all sums of the local shard are in place, and the group is notified

The thread sleeps until the window has a notification, then advances whatever it can, the most
urgent bucket first.

With servers, the stages `summed` and `returned` are theirs, and a worker passes them at once. A
server has no sender: it has passed `gathered` from the start.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import reduce

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.codecs.codec import Piece, add_up_wide, cut
from paceline.codecs.kernels.compiled import add_up
from paceline.comm.peer_activities import WaitLimit
from paceline.comm.window import Window
from paceline.errors import ConfigError, PeerLost
from paceline.reduce.put_engine.bucket_state import (
    BucketState,
    BucketStates,
    RankLayout,
    ReceiveBuffer,
)
from paceline.reduce.put_engine.gradient_views import Flags, LocalGradients
from paceline.reduce.put_engine.layout import CONTRIBUTION, FLAGS, PARAMETERS, SUM
from paceline.reduce.put_engine.sender import Sender
from paceline.reduce.put_engine.zero_suppression import RETURNED

_WAIT_SLICE_S = 0.5
_CLOSE_S = 5.0
_Versions = NDArray[np.int64]
_ALL = np.iinfo(np.int64).max  # versions


class Owner:
    """Owner of shards: sums the contributions to this rank's shard of each bucket.

    They are added in rank order inside a group, then in the groups' order.

    Args:
        window: this rank's window.
        rank_layout: layout of this rank.
        sender: of this rank's contributions; None: it has none.

    Attributes:
        done: (buckets,), for each bucket the last version for which all sums of this rank's local
            shard are in place; written by the owner's thread.
        error: the exception that ended the owner's thread; None while it runs.
        closed: whether `close` was called.
    """

    def __init__(
        self,
        window: Window,
        rank_layout: RankLayout,
        buckets: BucketStates,
        sender: Sender | None,
    ) -> None:
        self._window = window
        self._ranks = rank_layout
        self._buckets = buckets
        self._sender = sender
        self._count = count = len(buckets.slots)
        # (buckets,) each: the last version that passed a stage. No stage passes the one before it.
        self._gathered = np.zeros(count, np.int64)
        self._summed = np.zeros(count, np.int64)
        self._returned = np.zeros(count, np.int64)
        self.done = np.zeros(count, np.int64)
        self._flags_sent = np.zeros(count, np.int64)
        if sender is None:
            self._gathered[:] = _ALL
        self._sent = self._gathered if sender is None else sender.sent
        deferred = np.array([bucket.defers_return for bucket in buckets.first], bool)
        self._return_allowed = np.where(deferred, 0, _ALL)  # versions
        self._passes = max(map(len, buckets.slots), default=1)  # versions that can wait at once
        wide = [len(b.own_sums) for b in buckets.first if b.wide and b.shard is not None]
        self._wide_memory = torch.empty(max(wide, default=0))  # of one update's sums at a time
        self._peer_owners = list(rank_layout.peer_owners.values())
        self._group_peers = rank_layout.group_peers
        self._contributors = rank_layout.contributors
        # The caller's thread waits for these sums. Where a group reads them, this one notifies it.
        direct = [bucket.direct_return and not self._group_peers for bucket in buckets.first]
        self._direct_return = np.array(direct, bool)
        self._all_direct = bool(self._direct_return.all())
        leads = rank_layout.rank == rank_layout.leader != rank_layout.flags_sender
        self._relays_flags = leads and bool(rank_layout.group_peers)
        self.error: BaseException | None = None
        self._changed = threading.Condition()
        self.closed = False
        if self._all_direct:
            window.subscribe(count)  # no stage waits for sums or flags
        self._thread = threading.Thread(target=self._work, name="owner", daemon=True)
        self._thread.start()

    def allow_return(self, index: int, version: int) -> None:
        """Let the sums of a version return, once they are there."""
        self._return_allowed[index] = version
        self._window.wake()

    def check_returned(self, bucket: BucketState, peer: int, version: int) -> None:
        """Require that a peer hasn't returned the other of sums and parameters (ZeRO-1).

        Raises:
            ConfigError: it has: a script used gradients, or skipped the update, on some ranks only.
        """
        other = SUM if bucket.returns == PARAMETERS else PARAMETERS
        if self._window.values[peer, other * self._count + bucket.index] >= version:
            ranks = (self._ranks.rank, peer)
            one, without = ranks if other == PARAMETERS else ranks[::-1]
            raise ConfigError(
                f"gradients were used on rank {one} in {bucket.operation}, before "
                f"optimizer.step() or without it, but not on rank {without}: where ranks hold "
                "shards of the optimizer's state, call reduce() on all ranks before a gradient is "
                "used, and call optimizer.step() on all ranks or on none."
            )

    def wait(self, index: int, version: int, limit: WaitLimit) -> bool:
        """Wait until a version is done, or never will be; return whether it is."""

        def ended() -> bool:
            return bool(self.done[index] >= version) or self.error is not None or self.closed

        with limit:
            while not ended() and not limit.look():
                with self._changed:
                    self._changed.wait_for(ended, limit.slice())
        return bool(self.done[index] >= version)

    def close(self) -> None:
        """Let the thread end, and the waits for it; the window is closed next."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()
        self._window.wake()

    def join(self) -> None:
        """Return once the thread has ended, or after a limit: an update may hang on a device."""
        self._thread.join(_CLOSE_S)
        self.error = None  # its traceback holds the thread's frames

    def _put(
        self,
        bucket: BucketState,
        peer: int,
        offset: int,
        source: torch.Tensor | list[torch.Tensor] | None,
        kind: int,
        version: int,
    ) -> None:
        """Put a source, and notify of its kind."""
        row = kind * self._count + bucket.index
        self._window.put(peer, offset, source, row, version, -bucket.index)

    def _work(self) -> None:
        events = 0
        try:
            while not self.closed:
                for _ in range(self._passes):
                    self._advance()  # as far as events so far allow; later ones end the wait
                events = self._window.wait_for_event(events, _WAIT_SLICE_S)
        except BaseException as error:
            first = self._window.lost_first(error) if isinstance(error, PeerLost) else error
            with self._changed:
                self.error = first
                self._changed.notify_all()

    def _advance(self) -> None:
        """Advance every bucket by a version in each stage, where it can."""
        ranks = self._ranks
        values = self._window.values
        count = self._count
        if ranks.local_shard is None:
            return
        contributed = _least(values, self._group_peers, 0, count, self._sent)
        for index in _indices(self._gathered < contributed):
            self._gather(index)
        contributed_by_groups = _least(values, self._contributors, 0, count, self._gathered)
        for index in _indices(self._summed < contributed_by_groups):
            self._sum(index)
        for index in _indices(self._returned < np.minimum(self._summed, self._return_allowed)):
            self._return_sums(index)
        returned = self._returned
        if not self._all_direct:
            both = np.maximum(values[:, count : 2 * count], values[:, 3 * count : 4 * count])
            returned = np.where(
                self._direct_return, returned, _least(both, self._peer_owners, 0, count, returned)
            )
        for index in _indices(self.done < returned):
            self._finish(index)
        if self._relays_flags:
            self._relay_flags(values[ranks.flags_sender, 2 * count : 3 * count])

    def _gather(self, index: int) -> None:
        """Sum the group's contributions to this rank's local shard: reduce-scatter inside it."""
        version = int(self._gathered[index]) + 1
        bucket = self._buckets.at(index, version)
        gradients = bucket.local_gradients
        assert gradients is not None
        assert self._sender is not None
        if bucket.empty:
            for peer in self._peer_owners:
                self._put(bucket, peer, 0, None, CONTRIBUTION, version)
        else:
            ours = cut(gradients.pieces, bucket.local_shard)
            bucket.gathered = ours
            bucket.weight = gradients.weight
            bucket.flags = gradients.flags
            if self._group_peers and bucket.wide:
                self._gather_wide(bucket, gradients)
            elif self._group_peers:
                self._sum_group_ranks(bucket, gradients, ours)
            if self._group_peers or bucket.feedback is not None:  # otherwise `send` has put them
                flags = bucket.flags
                self._sender.put_shards(bucket, bucket.gathered, bucket.weight, flags, version)
        self._gathered[index] = version

    def _sum_group_ranks(
        self, bucket: BucketState, gradients: LocalGradients, ours: Sequence[Piece]
    ) -> None:
        """Sum in rank order: into a temporary if there are other groups, else into the sums."""
        alone = not self._peer_owners
        total = bucket.sums[bucket.local_shard]
        if not alone:
            total = torch.empty_like(total)
        buffers = bucket.from_group_ranks
        contributions = [
            ours if r is None else [(0, len(total), r.values.view(total.dtype))] for r in buffers
        ]
        weights = [gradients.weight if r is None else r.weight for r in buffers]
        add_up(contributions, weights, total, past_caches=alone)
        bucket.gathered = [(0, len(total), total)]
        bucket.weight = 1.0
        bucket.flags = _union([gradients.flags if r is None else r.flags for r in buffers])

    def _gather_wide(self, bucket: BucketState, gradients: LocalGradients) -> None:
        """Unite the group's flags; sum where other groups need it, else when the sum returns."""
        buffers = bucket.from_group_ranks
        bucket.flags = _union([gradients.flags if r is None else r.flags for r in buffers])
        if self._peer_owners:
            values = bucket.local_shard
            total = torch.empty(values.stop - values.start)  # stays until it is sent
            _wide_sum(bucket, buffers, bucket.gathered, total)
            bucket.gathered = [(0, len(total), total)]
            bucket.weight = 1.0

    def _sum(self, index: int) -> None:
        """Sum the groups' contributions to this rank's shard."""
        version = int(self._summed[index]) + 1
        bucket = self._buckets.at(index, version)
        if not bucket.empty:
            if self._contributors:
                if not bucket.wide:
                    self._sum_groups(bucket)
                flags = [bucket.flags if r is None else r.flags for r in bucket.from_groups]
                bucket.flags = _union([each for each in flags if each is not None])
            elif not bucket.wide and not (self._group_peers or self._peer_owners):
                add_up([bucket.gathered], [bucket.weight], bucket.sums)
            if self._ranks.rank == self._ranks.flags_sender:
                self._send_flags(bucket, version)
        self._summed[index] = version

    def _sum_groups(self, bucket: BucketState) -> None:
        buffers = bucket.from_groups
        own = bucket.own_sums
        if bucket.suppression is not None:
            bucket.restore_contributions(bucket.suppression)
        ours = cut(bucket.gathered, bucket.own_shard)
        if bucket.codec is None:
            contributions = [
                ours if r is None else [(0, len(own), r.values.view(own.dtype))] for r in buffers
            ]
            add_up(contributions, [bucket.weight if r is None else r.weight for r in buffers], own)
        elif bucket.feedback is not None and not bucket.defers_return:
            encoded = [None if r is None else r.values for r in buffers]
            bucket.feedback.reduce(self._ranks.group, encoded, ours, bucket.weight, own)
        else:  # an update, or a server's contributors, get the sum before it is encoded
            for number, buffer in enumerate(buffers):
                if buffer is not None:
                    bucket.codec.decode(buffer.values, own, add=number > 0)
                elif number:
                    add_up([[(0, len(own), own)], ours], [1.0, bucket.weight], own)
                else:
                    add_up([ours], [bucket.weight], own)

    def _return_sums(self, index: int) -> None:
        """Put the shard's sums, or updated parameters, to the other owners: the all-gather."""
        version = int(self._returned[index]) + 1
        bucket = self._buckets.at(index, version)
        source = total = bucket.own_sums
        if bucket.wide:
            total = self._wide_total(bucket)
        returns = bucket.returns  # the caller sets it anew once one contributor has the version
        feedback = bucket.feedback
        group = self._ranks.group
        if bucket.update is not None:
            if feedback is not None and not bucket.empty:
                feedback.complete_sums(group, bucket.own_sums)
            bucket.update(total)
        elif bucket.wide:
            source.copy_(total)
        elif feedback is not None:
            encoded = not bucket.defers_return
            source = feedback.data[group] if encoded else feedback.encode_sums(group, source)
        self._returned[index] = version
        data = [source]
        if bucket.sum_suppression is not None:
            data = bucket.sum_suppression.suppress(RETURNED, data)
        for peer in self._contributors:
            self._put(bucket, peer, bucket.returned_at, data, returns, version)

    def _wide_total(self, bucket: BucketState) -> Tensor:
        """Sum a wide bucket's contributions to this rank's shard, (values,), in float32."""
        total = self._wide_memory[: len(bucket.own_sums)]
        if bucket.empty:
            return total
        if self._contributors:
            ours = cut(bucket.gathered, bucket.own_shard)
            return _wide_sum(bucket, bucket.from_groups, ours, total)
        return _wide_sum(bucket, bucket.from_group_ranks or [None], bucket.gathered, total)

    def _finish(self, index: int) -> None:
        """Write the other groups' sums to the group's memory, and notify the group."""
        version = int(self.done[index]) + 1
        bucket = self._buckets.at(index, version)
        if not self._direct_return[index]:
            for peer in self._peer_owners:
                self.check_returned(bucket, peer, version)
        restore = bucket.sum_suppression
        returned = bucket.returned if restore is None else bucket.restored_sums(restore)
        for sums, encoded, plain in returned:
            if bucket.feedback is not None and bucket.update is None:
                bucket.feedback.return_codec.decode(encoded, sums)
            else:
                sums.copy_(plain)
        for peer in self._group_peers:
            self._put(bucket, peer, 0, None, bucket.returns, version)
        with self._changed:
            self.done[index] = version
            self._changed.notify_all()

    def _send_flags(self, bucket: BucketState, version: int) -> None:
        """Send all ranks the flags of the parameters, if any rank didn't use them all."""
        flags = bucket.flags
        assert flags is not None
        if (flags == 1).all():
            return
        bucket.used[:] = flags
        source = torch.from_numpy(flags.copy())
        for peer in self._ranks.leaders:
            if peer != self._ranks.rank:
                self._put(bucket, peer, bucket.used_at, source, FLAGS, version)
        for peer in self._group_peers:
            self._put(bucket, peer, 0, None, FLAGS, version)

    def _relay_flags(self, versions: _Versions) -> None:
        """Notify the group of flags that have come."""
        for index in _indices(self._flags_sent < versions):
            self._flags_sent[index] = versions[index]
            for peer in self._group_peers:
                self._put(self._buckets.first[index], peer, 0, None, FLAGS, int(versions[index]))


def _least(
    values: _Versions, peers: Sequence[int], start: int, stop: int, bound: _Versions
) -> _Versions:
    """Return the versions that all of some peers have notified of, and at most a bound."""
    return reduce(np.minimum, (values[peer, start:stop] for peer in peers), bound)


def _indices(which: NDArray[np.bool_]) -> list[int]:
    """Return where something is true, the most urgent bucket first."""
    found: list[int] = which.nonzero()[0][::-1].tolist()
    return found


def _wide_sum(
    bucket: BucketState, buffers: Sequence[ReceiveBuffer | None], ours: Sequence[Piece], out: Tensor
) -> Tensor:
    """Sum wide contributions in order to `out`; this rank's are `ours`, whose buffer is None."""
    among_groups = buffers is bucket.from_groups
    dtype = bucket.group_dtype if among_groups else bucket.sums.dtype
    parts = [ours if r is None else [(0, len(out), r.values.view(dtype))] for r in buffers]
    weights = [bucket.weight if r is None else r.weight for r in buffers]
    return add_up_wide(parts, weights, out)


def _union(flags: Sequence[Flags]) -> Flags:
    """Unite the flags of several ranks or groups."""
    union = flags[0]
    for more in flags[1:]:
        if not np.array_equal(union, more):
            union = np.where(union == more, union, 2).astype(np.uint8)
    return union
