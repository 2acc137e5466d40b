"""Exchange by one-sided puts: a reduce-scatter of each bucket to its owners, and an all-gather.

    this rank's gradients ─┬─▶ its group's owners: sum in rank order        (shared memory)
                           └── its own local shard  │
                                                    ▼                        reduce-scatter
    the other groups' owners of the local shard ◀── shards ──▶ sum in the groups' order
    ─────────────────────────────────────────────────────────────────────────────────────────
    the sums, which all ranks of a group read ◀── sums ── the owners of the shards
                                                                             all-gather
    the group ◀── a notification

A version counts the exchanges of a bucket. Nothing is acknowledged, because it is implied: a rank
sends version v + 1 of a bucket only after it has read version v of all its sums, or with k + 1
slots, version v - k (`sender.py`). Flags may still be on their way to ranks that don't need them;
they keep their order.

Servers may own all shards: then they alone receive contributions of other groups, and return sums
(`shard_server.py`).

A sum needs all ranks. So a wait for one peer ends as well when another one is lost, and a timeout
names the ranks whose contributions are missing, rather than an owner that waits for them too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from torch import Tensor

from paceline.comm.peer_activities import Timeout
from paceline.comm.window import THIS_PROCESS_CLOSED, Window, timed_out
from paceline.errors import CommError, CommTimeout, PeerLost
from paceline.reduce.put_engine.bucket_state import BucketState, BucketStates, RankLayout, Update
from paceline.reduce.put_engine.error_feedback import ErrorFeedback
from paceline.reduce.put_engine.gradient_views import Flags, LocalGradients
from paceline.reduce.put_engine.layout import CONTRIBUTION, FLAGS, PARAMETERS, SUM, Layout
from paceline.reduce.put_engine.messages import Messages
from paceline.reduce.put_engine.owner import Owner
from paceline.reduce.put_engine.sender import Sender

_WAIT_SLICE_S = 0.5  # until a wait for one peer notices that another one is lost


class PutExchange:
    """Exchange by puts: reduce-scatter of buckets to shard owners and all-gather of the sums.

    Args:
        window: this rank's window, reserved for this exchange.
        layout: layout of the window, the same on all ranks.
        templates: for each bucket, tensors of its parameters' shapes and strides.
        names: for each bucket, the parameters' names.
        timeout: timeout of each wait for a peer.

    Attributes:
        messages: exchanged with servers that return parameters.
    """

    zero_copy = True

    def __init__(
        self,
        window: Window,
        layout: Layout,
        templates: Sequence[Sequence[Tensor]],
        names: Sequence[Sequence[str]],
        timeout: Timeout,
    ) -> None:
        self._window = window
        self._layout = layout
        self._timeout = timeout
        self._ranks = ranks = RankLayout(layout, window)
        self._buckets = BucketStates(layout, ranks, templates, names)
        fixed = [bucket.traffic(ranks.local_shard, ranks.group) for bucket in layout.buckets]
        # `GpuStaging` and `MachineSums` hold this list too, so it is changed in place.
        self.traffic = list(fixed)
        self._fixed_traffic = fixed
        self._sender = Sender(window, ranks, self._buckets)
        self._owner = Owner(window, ranks, self._buckets, self._sender)
        self.messages = Messages(window, layout, timeout)

    @property
    def feedbacks(self) -> list[ErrorFeedback | None]:
        """The error feedback of each bucket; None where this rank encodes nothing."""
        return [bucket.feedback for bucket in self._buckets.first]

    def begin(self, scale: float, indices: Sequence[int] | None = None) -> None:
        """Let the residuals that the buckets' last versions left take effect."""
        for bucket in self._buckets.first:
            if bucket.feedback is not None and (indices is None or bucket.index in indices):
                bucket.feedback.begin(scale)

    def first_to_wait_for(self, index: int) -> int:
        """Return the bucket itself: sums come in no order."""
        return index

    def send(
        self, index: int, values: Sequence[Tensor | None], weight: float, operation: str
    ) -> int:
        """Put this rank's contributions to the owners; what is read sooner is more urgent.

        Raises:
            PeerLost: a peer ended.
        """
        try:
            return self._sender.send(index, values, weight, operation)
        except PeerLost as error:  # perhaps only because it lost another before
            self._raise_first_loss(error.during(operation), operation)

    def send_empty(self, index: int) -> int:
        """Begin a version without gradients: owners have been given theirs; return it."""
        return self._sender.send_empty(index)

    def return_sums(self, index: int, update: Update | None) -> None:
        """Let a shard's sums return, or the parameters that `update` writes in their place.

        Args:
            update: gets the sums of the shard, (values,): its memory, or a float32 temporary where
                the bucket is wide.
        """
        self._newest(index).let_return(update, parameters=update is not None)
        self._owner.allow_return(index, int(self._sender.sent[index]))

    def expect(self, index: int, *, parameters: bool) -> int:
        """Expect a bucket's sums from the servers, or the parameters that they update by them.

        Returns:
            the version that returns them: the last one that was sent.
        """
        version = int(self._sender.sent[index])
        self._newest(index).let_return(None, parameters=parameters)
        self._owner.allow_return(index, version)
        return version

    def shard(self, index: int) -> tuple[slice, Tensor] | None:
        """Return the values of a bucket that this rank owns, and the memory of their sums."""
        return self._buckets.first[index].shard

    def flags(self, index: int) -> Flags:
        """Return which parameters of a bucket any rank used, once it is summed."""
        flags = self._newest(index).flags
        assert flags is not None
        return flags

    def unread(self, index: int) -> int:
        """Return how many versions of a bucket were sent and not waited for."""
        return int(self._sender.sent[index] - self._sender.read[index])

    def arrived(self, index: int, version: int) -> bool:
        """Return whether what a version returns is here, so that `wait` returns it at once."""
        bucket = self._buckets.at(index, version)
        row = bucket.returns * len(self._buckets.first) + index
        there = all(self._window.values[p, row] >= version for p in self._returning(bucket))
        owns = self._ranks.local_shard is not None
        return there and (not owns or bool(self._owner.done[index] >= version))

    def wait(self, index: int, version: int) -> list[Tensor | None]:
        """Return the sums of a bucket's version.

        Raises:
            CommError: a peer was lost, or a wait timed out.
            ConfigError: a gradient was written since it was sent.
        """
        bucket = self._buckets.at(index, version)
        gradients = self._wait_for_sums(bucket, version)
        gradients.check_unwritten()
        if gradients.full or bucket.returns == PARAMETERS:
            return list(bucket.views)
        sender = self._ranks.leader
        if sender == self._ranks.rank:
            sender = self._ranks.flags_sender
        if sender != self._ranks.rank:
            self._wait_for(bucket, version, sender, FLAGS)
        used = bucket.used.tolist()
        return [view if flag else None for view, flag in zip(bucket.views, used, strict=True)]

    def abandon(self, index: int, version: int | None) -> None:
        """Wait for a version's sums if `wait` hasn't, and let the step leave no residual.

        Raises:
            CommError: a peer was lost, or a wait timed out.
        """
        if version is not None:
            self._wait_for_sums(self._buckets.at(index, version), version)
        feedback = self._buckets.first[index].feedback
        if feedback is not None:
            feedback.abandon()

    def drain(self) -> None:
        """Announce that this rank has all its sums, and return once all others have theirs.

        It also returns at the limit, and when a peer starts another step: that peer must see this
        rank's end at once, because this rank sends nothing more.
        """
        window = self._window
        ranks = self._ranks
        count = len(self._buckets.first)
        if self._owner.error is not None or (self._sender.read != self._sender.sent).any():
            return
        last = self._layout.draining
        limit = self._timeout.later
        with suppress(CommError):  # a peer that has gone needs nothing
            window.subscribe(last + 1)
            for peer in ranks.peers:
                window.put(peer, 0, None, last, 1)
            deadline = time.monotonic() + limit
            events = 0
            while not_drained := [peer for peer in ranks.peers if not window.values[peer, last]]:
                sends_more = (window.values[not_drained, :count] > self._sender.sent).any()
                if sends_more or self._owner.error is not None or time.monotonic() >= deadline:
                    return
                events = window.wait_for_event(events, _WAIT_SLICE_S)
            for peer in ranks.peers:
                window.flush(peer, limit=limit, operation="the shutdown")

    def close(self) -> None:
        """End the thread, and the window."""
        self._owner.close()
        self._window.close()
        self._owner.join()
        for bucket in self._buckets.first:
            bucket.update = None  # it holds the synchronizer

    def _wait_for_sums(self, bucket: BucketState, version: int) -> LocalGradients:
        """Wait for a version's sums; return this rank's gradients, and let go of them."""
        ranks = self._ranks
        for peer in self._returning(bucket):
            self._wait_for(bucket, version, peer, bucket.returns)
        if ranks.local_shard is not None and not self._owner.wait(
            bucket.index, version, self._timeout.limit(bucket.operation)
        ):
            self._raise_owner_error(bucket.operation)
            raise self._timed_out(bucket, version, None)
        if bucket.suppression is not None:
            fixed = self._fixed_traffic[bucket.index]
            suppressed = bucket.suppression.traffic()
            self.traffic[bucket.index] = fixed[0] + suppressed[0], fixed[1] + suppressed[1]
        return self._sender.count_read(bucket, version)

    def _returning(self, bucket: BucketState) -> list[int]:
        """Return the peers whose notifications announce what a bucket's version returns."""
        ranks = self._ranks
        if not ranks.group_peers and bucket.direct_return:
            return list(ranks.peer_owners.values())
        return [owner for owner in ranks.owners if owner != ranks.rank]

    def _newest(self, index: int) -> BucketState:
        """Return the state of the version that was sent last."""
        return self._buckets.at(index, int(self._sender.sent[index]))

    def _wait_for(self, bucket: BucketState, version: int, peer: int, kind: int) -> None:
        """Wait for a peer's notification of a bucket's version.

        Raises:
            PeerLost: a peer ended, this one or another; CommTimeout: none came in time.
        """
        row = kind * len(self._buckets.first) + bucket.index
        operation = bucket.operation
        with self._timeout.limit(operation) as limit:
            while True:
                within = limit.slice(_WAIT_SLICE_S)
                try:
                    self._window.wait(peer, row, version, limit=within, operation=operation)
                    return
                except CommTimeout:
                    self._raise_owner_error(operation)
                    if kind in (SUM, PARAMETERS):
                        self._owner.check_returned(bucket, peer, version)
                    if limit.look():
                        raise self._timed_out(bucket, version, peer) from None
                except PeerLost as error:  # perhaps only because it lost another before
                    self._raise_first_loss(error, operation)

    def _raise_first_loss(self, error: PeerLost, operation: str) -> NoReturn:
        """Raise what the owner's thread noticed, or else the loss that came before all others."""
        self._raise_owner_error(operation)
        raise self._named(self._window.lost_first(error))

    def _raise_owner_error(self, operation: str) -> None:
        """Raise what ended the owner's thread, if anything did: it noticed first who was lost."""
        rank = self._ranks.rank
        if self._owner.closed:
            raise PeerLost(rank=rank, operation=operation, cause=THIS_PROCESS_CLOSED)
        error = self._owner.error
        if isinstance(error, PeerLost):
            raise self._named(error.during(operation)) from error
        if error is not None:
            raise error

    def _named(self, error: PeerLost) -> PeerLost:
        """Name the server, if one is the peer that was lost."""
        servers = self._ranks.servers
        return error if error.peer not in servers else error.named(servers[error.peer])

    def _timed_out(self, bucket: BucketState, version: int, awaited: int | None) -> CommTimeout:
        """Name the ranks whose contributions, or sums, have not come."""
        ranks = self._ranks
        values = self._window.values
        count = len(self._buckets.first)
        peer_owners = ranks.peer_owners.values()

        def missing(peers: Sequence[int], kind: int) -> list[int]:
            return [p for p in peers if values[p, kind * count + bucket.index] < version]

        missing_ranks = missing([*ranks.group_peers, *ranks.contributors], CONTRIBUTION)
        if not missing_ranks:
            returned = missing([*peer_owners], bucket.returns)
            missing_ranks = returned if awaited is None else [awaited]
        if missing_ranks and missing_ranks[0] in ranks.servers:
            peer = f"{ranks.servers[missing_ranks[0]]}, or a worker that it waits for,"
            return timed_out(ranks.rank, self._timeout.seconds, peer, bucket.operation)
        names = ", ".join(map(str, sorted(missing_ranks)))
        peer = f"rank{'s' if len(missing_ranks) > 1 else ''} {names}" if missing_ranks else "itself"
        return timed_out(ranks.rank, self._timeout.seconds, peer, bucket.operation)
