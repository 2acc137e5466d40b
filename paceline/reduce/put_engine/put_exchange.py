"""Adds up what ranks have, by puts and notifications: an exchange in which each owns a shard.

    this rank's values ─┬─▶ its group's owners ── add, in rank order ──┐     (shared memory)
                        └── its own slice                              ▼
    the other groups' owners of its channel ◀── shards ──▶ add, in group order, and send back
                                                                       ▼
    the sums, which all ranks of a group read                   notify the group

A version counts the exchanges of a run. Nothing is acknowledged, because it is implied: a rank
sends version v + 1 of a run only after it has read version v of all its sums, so whoever has
version v + 1 of everybody's part knows that nobody needs anything of v any more. Flags may still be
on their way to who doesn't need them; they keep their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from torch import Tensor

from paceline.codecs.kernels.kernels import add_up
from paceline.comm.window import Window
from paceline.errors import CommError, PeerLost
from paceline.reduce.put_engine.bucket_state import BucketState
from paceline.reduce.put_engine.error_feedback import ErrorFeedback
from paceline.reduce.put_engine.gradient_views import NOTHING, Contribution, Flags
from paceline.reduce.put_engine.layout import Layout
from paceline.reduce.put_engine.rank_layout import RankLayout
from paceline.reduce.put_engine.shard_reducer import ShardReducer
from paceline.reduce.put_engine.traffic import traffic
from paceline.reduce.put_engine.waits import Waits


class PutExchange:
    """Exchanges runs over a window, and owns this rank's shard of every run.

    Args:
        window: this rank's; nobody else uses it.
        layout: of the window, the same on all ranks.
        templates: of each run, tensors of its parameters' shapes and strides.
        names: of each run, the parameters' names.
        limits: seconds to wait for a peer, in the first step and later.
        steady: is called after the first step.
    """

    zero_copy = True

    def __init__(
        self,
        window: Window,
        layout: Layout,
        templates: Sequence[Sequence[Tensor]],
        names: Sequence[Sequence[str]],
        limits: tuple[float, float],
        steady: Callable[[], None] = lambda: None,
    ) -> None:
        self._window = window
        self._rank_layout = rank_layout = RankLayout(layout, window)
        self._buckets = [
            BucketState(bucket_layout, rank_layout, tensors, words)
            for bucket_layout, tensors, words in zip(layout.buckets, templates, names, strict=True)
        ]
        self._traffic = [traffic(bucket_layout, rank_layout) for bucket_layout in layout.buckets]
        self._reducer = ShardReducer(window, rank_layout, self._buckets)
        held = [
            bucket.bucket_layout.index
            for bucket in self._buckets
            if bucket.bucket_layout.spec.updated
        ]
        self._reducer.released[held] = 0
        first, self._later = limits
        self._waits = Waits(window, rank_layout, self._reducer, len(self._buckets), first)
        self._steady = steady

    def steady(self) -> None:
        """Wait less long from now on."""
        self._waits.limit = self._later
        self._steady()

    def begin(self, *, applied: bool, scale: float) -> None:
        """Keep what the wires missed in the step before, if it took effect."""
        for feedback in self.feedbacks:
            if feedback is not None:
                feedback.begin(applied=applied, scale=scale)

    @property
    def feedbacks(self) -> list[ErrorFeedback | None]:
        """What codes each run; None where this rank codes nothing."""
        return [bucket.feedback for bucket in self._buckets]

    def traffic(self, index: int) -> tuple[int, int]:
        """Return the bytes that go to other groups and come from them."""
        return self._traffic[index]

    def next(self, index: int) -> int:
        """Return the run itself: they arrive in no order."""
        return index

    def send(self, index: int, values: Sequence[Tensor | None], weight: float) -> None:
        """Hand this rank's values to the owners, the more urgent the sooner they are read.

        Raises:
            PeerLost: a peer ended.
        """
        bucket = self._buckets[index]
        bucket.empty, bucket.update = False, None
        bucket.contribution = contribution = bucket.gradients.contribution(values, weight)
        try:
            self._put(bucket, contribution)
        except PeerLost:
            self._waits.raise_reducer_error("a put")
            raise
        self._reducer.go_on(bucket)

    def send_empty(self, index: int) -> None:
        """Begin a version of which each owner has the sums already."""
        bucket, version = self._buckets[index], int(self._reducer.sent[index]) + 1
        bucket.empty, bucket.contribution = True, NOTHING
        for owner in self._rank_layout.owners:
            if owner != self._rank_layout.rank:
                self._window.put(owner, 0, None, index, version, -index)
        self._reducer.go_on(bucket)

    def return_sums(self, index: int, update: Callable[[], None] | None) -> None:
        """Let a shard's sums go back, or what `update` makes of them in their place."""
        bucket = self._buckets[index]
        bucket.update = update
        self._reducer.release(bucket)

    def shard(self, index: int) -> tuple[slice, Tensor] | None:
        """Return which values of a run this rank owns, and the place of their sums."""
        bucket, rank_layout = self._buckets[index], self._rank_layout
        if rank_layout.local_shard is None or bucket.shard is None:
            return None
        return bucket.bucket_layout.shard(rank_layout.local_shard, rank_layout.group), bucket.shard

    def flags(self, index: int) -> Flags:
        """Return which parameters of a run that was added up anybody used."""
        flags = self._buckets[index].flags
        assert flags is not None
        return flags

    def wait(self, index: int, operation: str) -> list[Tensor | None]:
        """Return the sums of a run's last version.

        Raises:
            CommError: a peer was lost, or silent.
            ConfigError: a gradient was written since it was sent.
        """
        bucket = self._buckets[index]
        contribution = self._summed(index, operation)
        contribution.refuse_writes()
        if contribution.full or bucket.update is not None:
            return list(bucket.views)
        self._wait_for_flags(index, int(self._reducer.sent[index]), operation)
        used = self._rank_layout.flags(bucket.bucket_layout).tolist()
        return [view if flag else None for view, flag in zip(bucket.views, used, strict=True)]

    def discard(self, index: int, operation: str) -> None:
        """Wait for the sums of a run's last version, whatever was written since it was sent.

        Raises:
            CommError: a peer was lost, or silent.
        """
        self._summed(index, operation)

    def drain(self) -> None:
        """Serve the peers until they have all their sums, as this rank has its own."""
        if self._reducer.error is None and all(
            bucket.contribution is None for bucket in self._buckets
        ):
            with suppress(CommError):  # a peer that has gone needs nothing
                self._waits.drain(self._later)

    def close(self) -> None:
        """End the thread, and the window."""
        self._reducer.close()
        self._window.close()
        self._reducer.join()
        for bucket in self._buckets:
            bucket.update = None  # which keeps whoever gave it

    def _put(self, bucket: BucketState, contribution: Contribution) -> None:
        rank_layout, bucket_layout = self._rank_layout, bucket.bucket_layout
        index, version = bucket_layout.index, int(self._reducer.sent[bucket_layout.index]) + 1
        for local_shard, owner in enumerate(rank_layout.owners):
            if owner == rank_layout.rank:
                continue
            buffer = bucket.to_owners[owner]
            buffer.write_head(1.0, contribution.flags)
            pieces = contribution.within(bucket_layout.local_shard(local_shard))
            add_up([pieces], [contribution.weight], buffer.values, past_caches=True)
            self._window.put(owner, 0, None, index, version, -index)
        if len(rank_layout.members) == 1 and rank_layout.peer_owners and bucket.feedback is None:
            self._reducer.put_shards(
                bucket, contribution.pieces, contribution.weight, contribution.flags, version
            )

    def _summed(self, index: int, operation: str) -> Contribution:
        """Wait for a run's sums; return what this rank sent, which needn't be kept any more."""
        bucket, rank_layout = self._buckets[index], self._rank_layout
        version, row = int(self._reducer.sent[index]), len(self._buckets) + index
        senders = [owner for owner in rank_layout.owners if owner != rank_layout.rank]
        if not rank_layout.group_peers and bucket.lands:
            senders = list(rank_layout.peer_owners.values())
        for peer in senders:
            self._waits.notification(peer, row, version, operation)
        if rank_layout.local_shard is not None:
            self._waits.reducer(index, version, operation)
        contribution, bucket.contribution, bucket.ours = bucket.contribution, None, []
        assert contribution is not None
        return contribution

    def _wait_for_flags(self, index: int, version: int, operation: str) -> None:
        rank_layout, row = self._rank_layout, 2 * len(self._buckets) + index
        teller = (
            rank_layout.leaders[0] if rank_layout.rank == rank_layout.leader else rank_layout.leader
        )
        if teller != rank_layout.rank:
            self._waits.notification(teller, row, version, operation)
