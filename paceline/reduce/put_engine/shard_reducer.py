"""The part of an owner: adds up its slice, its shard, and tells whoever needs the sums.

    gathered   what the group has of this rank's slice is added up, in rank order
    summed     what the groups have of its shard is, in their order
    returned   it is on its way back, or what an update has made of it (`--update sharded`)
    done       the sums of the whole slice are in place, and the group knows

Each is a version, a run. A thread of its own goes on with whatever has become possible, the most
urgent first.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import reduce

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.codecs.kernels.kernels import add_up
from paceline.codecs.pieces import Piece, cut
from paceline.comm.window import Window
from paceline.reduce.put_engine.bucket_state import BucketState
from paceline.reduce.put_engine.gradient_views import Flags
from paceline.reduce.put_engine.rank_layout import RankLayout, head_of

_WAIT_SLICE_S = 0.5
_Versions = NDArray[np.int64]


class ShardReducer:
    """Adds up what this rank owns.

    Args:
        window: this rank's.
        rank_layout: of this rank.
        states: all runs.

    Attributes:
        sent: (runs,), the versions that this rank has sent.
        released: (runs,), the versions that may go back; all, unless somebody sets it.
        done: (runs,), the versions whose sums are in place, of this rank's slice.
        error: what ended the thread.
    """

    def __init__(
        self, window: Window, rank_layout: RankLayout, states: Sequence[BucketState]
    ) -> None:
        self._window, self._rank_layout, self._buckets = window, rank_layout, states
        self._count = len(states)
        self.sent, self._gathered, self._summed, self._returned, self.done, self._told = np.zeros(
            (6, self._count), np.int64
        )
        self.released = np.full(self._count, np.iinfo(np.int64).max)
        self._lands = np.array([bucket.lands for bucket in states], bool)
        self._all_land = bool(self._lands.all())
        self._peer_owners, self._group_peers = (
            list(rank_layout.peer_owners.values()),
            rank_layout.group_peers,
        )
        self._relays = rank_layout.rank == rank_layout.leader != rank_layout.leaders[0] and bool(
            rank_layout.group_peers
        )
        self.error: BaseException | None = None
        self._changed = threading.Condition()
        self._closed = False
        if self._all_land:
            window.subscribe(self._count)  # sums and flags are for who waits for them
        self._thread = threading.Thread(target=self._work, name="owner", daemon=True)
        self._thread.start()

    def go_on(self, bucket: BucketState) -> None:
        """Take this rank's part into account."""
        index, values = bucket.bucket_layout.index, self._window.values
        self.sent[index] += 1
        version = self.sent[index]
        awaited = self._group_peers or (self._peer_owners if bucket.feedback is None else ())
        if all(values[peer, index] >= version for peer in awaited):
            self._window.wake()

    def release(self, bucket: BucketState) -> None:
        """Let the shard that this rank has sent its part of go back, once it is added up."""
        self.released[bucket.bucket_layout.index] = self.sent[bucket.bucket_layout.index]
        self._window.wake()

    def wait(self, index: int, version: int, limit: float) -> bool:
        """Wait until a version is done; return whether it is."""
        if self.done[index] < version:
            with self._changed:
                self._changed.wait_for(
                    lambda: bool(self.done[index] >= version) or self.error is not None, limit
                )
        return bool(self.done[index] >= version)

    def close(self) -> None:
        """Let the thread end; the window is to be closed then."""
        self._closed = True
        self._window.wake()

    def join(self) -> None:
        """Return once the thread has ended."""
        self._thread.join()
        self.error = None  # its traceback keeps what the thread knew

    def put_shards(
        self,
        bucket: BucketState,
        pieces: Sequence[Piece],
        weight: float,
        flags: Flags,
        version: int,
    ) -> None:
        """Put what the group has of the other groups' shards to their owners.

        Args:
            bucket: whose shards.
            pieces: of this rank's slice.
            weight: what they are yet to be multiplied by.
            flags: of their parameters.
            version: of the run.
        """
        bucket_layout, rank_layout = bucket.bucket_layout, self._rank_layout
        assert rank_layout.local_shard is not None
        first = bucket_layout.local_shard(rank_layout.local_shard).start
        for group, owner in rank_layout.peer_owners.items():
            inside = cut(
                pieces, _moved(bucket_layout.shard(rank_layout.local_shard, group), -first)
            )
            if bucket.feedback is None:
                gradients = [
                    head_of(bucket_layout, weight, flags),
                    *(piece for _, _, piece in inside),
                ]
            else:
                data = bucket.feedback.encode(group, inside, weight)
                gradients = [head_of(bucket_layout, 1.0, flags), data]
            buffer = bucket_layout.cross[rank_layout.group]
            self._window.put(
                owner, buffer, gradients, bucket_layout.index, version, -bucket_layout.index
            )

    def _work(self) -> None:
        events = 0
        try:
            while not self._closed:
                self._advance()  # to what had come by then; later news are seen at once
                events = self._window.wait_for_event(events, _WAIT_SLICE_S)
        except BaseException as error:
            with self._changed:
                self.error = error
                self._changed.notify_all()

    def _advance(self) -> None:
        """Do what can be done."""
        rank_layout, values, count = self._rank_layout, self._window.values, self._count
        if rank_layout.local_shard is None:
            return
        parts = _least(values, self._group_peers, 0, count, self.sent)
        for index in _indices(self._gathered < parts):
            self._gather(self._buckets[index])
        crossed = _least(values, self._peer_owners, 0, count, self._gathered)
        for index in _indices(self._summed < crossed):
            self._sum(self._buckets[index])
        for index in _indices(self._returned < np.minimum(self._summed, self.released)):
            self._return_sums(self._buckets[index])
        back = self._returned
        if not self._all_land:
            back = np.where(
                self._lands, back, _least(values, self._peer_owners, count, 2 * count, back)
            )
        for index in _indices(self.done < back):
            self._finish(self._buckets[index])
        if self._relays:
            self._pass_flags_on(values[rank_layout.leaders[0], 2 * count : 3 * count])

    def _gather(self, bucket: BucketState) -> None:
        """Add up what the group has of this rank's slice."""
        bucket_layout, rank_layout, contribution = (
            bucket.bucket_layout,
            self._rank_layout,
            bucket.contribution,
        )
        assert contribution is not None
        assert rank_layout.local_shard is not None
        values = bucket_layout.local_shard(rank_layout.local_shard)
        version = int(self._gathered[bucket_layout.index]) + 1
        if bucket.empty:
            for peer in self._peer_owners:
                self._window.put(peer, 0, None, bucket_layout.index, version, -bucket_layout.index)
        elif not rank_layout.group_peers:
            bucket.ours, bucket.weight, bucket.flags = (
                contribution.within(values),
                contribution.weight,
                contribution.flags,
            )
            if bucket.feedback is not None:
                self.put_shards(
                    bucket, bucket.ours, contribution.weight, contribution.flags, version
                )
        else:
            size = values.stop - values.start
            total = (
                torch.empty(size, dtype=bucket_layout.spec.dtype)
                if rank_layout.peer_owners
                else bucket.sums[values]
            )
            buffers = bucket.from_members
            parts = [
                contribution.within(values) if buffer is None else [(0, size, buffer.values)]
                for buffer in buffers
            ]
            weights = [contribution.weight if buffer is None else 1.0 for buffer in buffers]
            add_up(parts, weights, total, past_caches=not rank_layout.peer_owners)
            bucket.ours, bucket.weight = [(0, size, total)], 1.0
            bucket.flags = _union(
                [
                    contribution.flags if buffer is None else buffer.flags(bucket_layout)
                    for buffer in buffers
                ]
            )
            if rank_layout.peer_owners:
                self.put_shards(bucket, bucket.ours, 1.0, bucket.flags, version)
        self._gathered[bucket_layout.index] = version

    def _sum(self, bucket: BucketState) -> None:
        """Add up what the groups have of this rank's shard."""
        bucket_layout, rank_layout = bucket.bucket_layout, self._rank_layout
        version = int(self._summed[bucket_layout.index]) + 1
        if not bucket.empty:
            if rank_layout.peer_owners:
                self._sum_groups(bucket)
            elif not rank_layout.group_peers:
                add_up([bucket.ours], [bucket.weight], bucket.sums)
            if rank_layout.rank == rank_layout.leaders[0]:
                self._tell_flags(bucket, version)
        self._summed[bucket_layout.index] = version

    def _sum_groups(self, bucket: BucketState) -> None:
        bucket_layout, rank_layout, own = bucket.bucket_layout, self._rank_layout, bucket.shard
        assert rank_layout.local_shard is not None
        assert own is not None
        assert bucket.flags is not None
        shard = bucket_layout.shard(rank_layout.local_shard, rank_layout.group)
        buffers, first = (
            bucket.from_groups,
            bucket_layout.local_shard(rank_layout.local_shard).start,
        )
        ours = cut(bucket.ours, _moved(shard, -first))
        if bucket.feedback is None:
            parts = [ours if r is None else [(0, len(own), _as(r.values, own))] for r in buffers]
            add_up(parts, [bucket.weight if r is None else r.weight for r in buffers], own)
        elif not bucket_layout.spec.updated:
            coded = [None if buffer is None else buffer.values for buffer in buffers]
            bucket.feedback.reduce(rank_layout.group, coded, ours, bucket.weight, own)
        else:
            for number, buffer in enumerate(buffers):
                if buffer is not None:
                    (bucket.feedback.add if number else bucket.feedback.decode)(buffer.values, own)
                elif number:
                    add_up([[(0, len(own), own)], ours], [1.0, bucket.weight], own)
                else:
                    add_up([ours], [bucket.weight], own)
        bucket.flags = _union(
            [bucket.flags if r is None else r.flags(bucket_layout) for r in buffers]
        )

    def _return_sums(self, bucket: BucketState) -> None:
        """Send the shard's sums back, or what an update makes of them."""
        bucket_layout, rank_layout, own = bucket.bucket_layout, self._rank_layout, bucket.shard
        assert rank_layout.local_shard is not None
        assert own is not None
        version, source = int(self._returned[bucket_layout.index]) + 1, own
        if bucket.update is not None:
            if bucket.feedback is not None and not bucket.empty:
                bucket.feedback.complete_sums(rank_layout.group, own)
            bucket.update()
        elif bucket.feedback is not None:
            feedback = bucket.feedback
            recode = bucket_layout.spec.updated  # the sums were left as they are for an update
            source = (
                feedback.encode_sums(rank_layout.group, own)
                if recode
                else feedback.coded(rank_layout.group)
            )
        self._returned[bucket_layout.index] = version
        shard = bucket_layout.shard(rank_layout.local_shard, rank_layout.group)
        where = (
            bucket_layout.sum_of(shard) if bucket.lands else bucket_layout.back[rank_layout.group]
        )
        for peer in self._peer_owners:
            self._window.put(
                peer,
                where,
                source,
                self._count + bucket_layout.index,
                version,
                -bucket_layout.index,
            )

    def _finish(self, bucket: BucketState) -> None:
        """Put what came from the other groups into the sums, and notify the group."""
        bucket_layout, rank_layout = bucket.bucket_layout, self._rank_layout
        assert rank_layout.local_shard is not None
        version = int(self.done[bucket_layout.index]) + 1
        for group in rank_layout.peer_owners if not bucket.lands else ():
            sums = bucket.sums[bucket_layout.shard(rank_layout.local_shard, group)]
            coded = bucket.feedback is not None and bucket.update is None
            data = rank_layout.back_buffer(bucket_layout, group, coded=coded)
            if not coded:
                sums.copy_(_as(data, sums))
            else:
                assert bucket.feedback is not None
                bucket.feedback.decode(data, sums)
        for peer in rank_layout.group_peers:
            self._window.put(
                peer, 0, None, self._count + bucket_layout.index, version, -bucket_layout.index
            )
        with self._changed:
            self.done[bucket_layout.index] = version
            self._changed.notify_all()

    def _tell_flags(self, bucket: BucketState, version: int) -> None:
        """Tell everybody which parameters were used, if somebody didn't use them all."""
        bucket_layout, rank_layout, flags = bucket.bucket_layout, self._rank_layout, bucket.flags
        assert flags is not None
        if (flags == 1).all():
            return
        rank_layout.flags(bucket_layout)[:] = flags
        row, source = 2 * self._count + bucket_layout.index, torch.from_numpy(flags.copy())
        for peer in rank_layout.leaders[1:]:
            self._window.put(peer, bucket_layout.flags, source, row, version, -bucket_layout.index)
        for peer in rank_layout.group_peers:
            self._window.put(peer, 0, None, row, version, -bucket_layout.index)

    def _pass_flags_on(self, versions: _Versions) -> None:
        """Pass flags on to the group."""
        for index in _indices(self._told < versions):
            self._told[index] = versions[index]
            row, version = 2 * self._count + index, int(versions[index])
            for peer in self._rank_layout.group_peers:
                self._window.put(peer, 0, None, row, version, -index)


def _least(
    values: _Versions, peers: Sequence[int], start: int, stop: int, bound: _Versions
) -> _Versions:
    """Return what all of some peers have reached, a notification, and no more than a bound."""
    return reduce(np.minimum, (values[peer, start:stop] for peer in peers), bound)


def _indices(which: NDArray[np.bool_]) -> list[int]:
    """Return where something is true, the most urgent run first."""
    found: list[int] = which.nonzero()[0][::-1].tolist()
    return found


def _union(flags: Sequence[Flags]) -> Flags:
    """Unite flags: 0 where nobody used a parameter, 1 where all did, 2 where some."""
    union = flags[0]
    for more in flags[1:]:
        if not np.array_equal(union, more):
            union = np.where(union == more, union, 2).astype(np.uint8)
    return union


def _moved(values: slice, by: int) -> slice:
    return slice(values.start + by, values.stop + by)


def _as(data: Tensor, like: Tensor) -> Tensor:
    """View bytes as values."""
    return data.view(like.dtype)
