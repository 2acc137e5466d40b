"""Shard server: an owner without a sender, in an exchange by puts whose servers own all shards.

    worker 0 ── contribution ──▶┌────────┐── sum ──▶ worker 0
    worker 1 ── contribution ──▶│ server │── sum ──▶ worker 1
    …                           └────────┘           …

It sums in the order of the groups, as an owner among the workers does. Sums return as they are, so
a server has no state between two versions of a bucket. Where parameters may return in place of the
sums, a version waits for `return_version`. Workers announce their end as in `PutExchange.drain`,
and wait for the servers' announcements, which `release` makes. Servers aren't connected with each
other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from paceline.comm.window import Window
from paceline.errors import CommError, PeerLost
from paceline.reduce.put_engine.bucket_state import BucketStates, RankLayout
from paceline.reduce.put_engine.gradient_views import Flags
from paceline.reduce.put_engine.layout import BucketLayout, Layout
from paceline.reduce.put_engine.owner import Owner

_WAIT_SLICE_S = 0.5
_RELEASE_S = 5.0


class ShardServer:
    """Shard server: sums all workers' contributions to its part of each bucket, and returns them.

    Args:
        window: the server's window, reserved for this exchange.
        layout: layout of the window, whose topology has servers.
    """

    def __init__(self, window: Window, layout: Layout) -> None:
        self._window = window
        self._layout = layout
        self._ranks = ranks = RankLayout(layout, window)
        templates = [_templates(bucket) for bucket in layout.buckets]
        names = [[""] * len(bucket.spec.lengths) for bucket in layout.buckets]
        self._buckets = BucketStates(layout, ranks, templates, names)
        self._owner = Owner(window, ranks, self._buckets, sender=None)
        self._last = layout.draining
        window.subscribe(layout.notifications)

    @property
    def versions(self) -> list[int]:
        """For each bucket, the number of its versions that were summed and returned."""
        versions: list[int] = self._owner.done.tolist()
        return versions

    @property
    def nbytes(self) -> int:
        """The bytes of the sums of all buckets."""
        return sum(b.spec.dtype.itemsize * b.numel for b in self._layout.buckets)

    def shard(self, index: int) -> slice:
        """Return the values of a bucket that this server owns."""
        shard = self._buckets.first[index].shard
        assert shard is not None
        return shard[0]

    def sums(self, index: int, version: int) -> Tensor:
        """Return the memory of the sums of this server's shard in a version, (values,)."""
        return self._buckets.at(index, version).own_sums

    def flags(self, index: int, version: int) -> Flags:
        """Return which parameters of a bucket any worker used, once the version is summed."""
        flags = self._buckets.at(index, version).flags
        assert flags is not None
        return flags

    def return_version(self, index: int, version: int, update: Callable[[], None] | None) -> None:
        """Let a version's sums return, or the parameters that `update` writes in their place."""
        bucket = self._buckets.at(index, version)
        bucket.let_return(None if update is None else lambda _: update(), parameters=bool(update))
        self._owner.allow_return(index, version)

    def serve(self, check: Callable[[], None] = lambda: None) -> None:
        """Return once all workers have announced their end; `release` lets them end.

        Args:
            check: called every half second or more often; what it raises ends the wait.

        Raises:
            PeerLost: a worker's connection ended before.
        """
        window = self._window
        events = 0
        try:
            while any(not window.values[peer, self._last] for peer in self._ranks.workers):
                check()
                if self._owner.error is not None:
                    raise self._owner.error
                events = window.wait_for_event(events, _WAIT_SLICE_S)
        except PeerLost as error:  # perhaps only because it lost another before
            raise window.lost_first(error).during("a merge") from error

    def release(self) -> None:
        """Let the workers end, which wait for it; return once one of them does."""
        window = self._window
        peers = self._ranks.peers
        events = 0
        with suppress(CommError):  # a worker that has gone needs nothing
            for peer in peers:
                window.put(peer, 0, None, self._last, 1)
            for peer in peers:
                window.flush(peer, limit=_RELEASE_S, operation="the shutdown")
            # To a worker that waits for another server, the end of this one would be a loss.
            deadline = time.monotonic() + _RELEASE_S
            while time.monotonic() < deadline:
                events = window.wait_for_event(events, _WAIT_SLICE_S)

    def close(self) -> None:
        """End the thread, and the window."""
        self._owner.close()
        self._window.close()
        self._owner.join()


def _templates(bucket: BucketLayout) -> list[Tensor]:
    """Make tensors of the shapes of a bucket's values, which take no memory."""
    dtype = bucket.spec.dtype
    return [torch.empty(length, dtype=dtype, device="meta") for length in bucket.spec.lengths]
