"""Shard server: owns all shards of an exchange by puts, and contributes nothing to them.

    worker 0 ── contribution ──▶┌────────┐── sum ──▶ worker 0
    worker 1 ── contribution ──▶│ server │── sum ──▶ worker 1
    …                           └────────┘           …

The server's shard reducer sums in the order of the groups, as an owner among the workers does. Sums
return as they are, so the server has no state between two versions of a bucket. Workers announce
their end as in `PutExchange.drain`, and wait for the server's announcement, which `release` makes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from paceline.comm.window import Window
from paceline.errors import CommError, PeerLost
from paceline.reduce.put_engine.bucket_state import BucketState, RankLayout
from paceline.reduce.put_engine.layout import BucketLayout, Layout
from paceline.reduce.put_engine.shard_reducer import ShardReducer

_WAIT_SLICE_S = 0.5
_FLUSH_S = 5.0


class ShardServer:
    """Shard server: sums the contributions of all workers to every bucket, and returns the sums.

    Args:
        window: the server's window, reserved for this exchange.
        layout: layout of the window, whose topology has a server.
    """

    def __init__(self, window: Window, layout: Layout) -> None:
        self._window = window
        self._layout = layout
        self._ranks = ranks = RankLayout(layout, window)
        self._buckets = [
            BucketState(bucket, ranks, _templates(bucket), [""] * len(bucket.spec.lengths))
            for bucket in layout.buckets
        ]
        self._reducer = ShardReducer(window, ranks, self._buckets)
        self._last = layout.notifications - 1
        window.subscribe(layout.notifications)

    @property
    def versions(self) -> list[int]:
        """For each bucket, the number of its versions that were summed and returned."""
        versions: list[int] = self._reducer.done.tolist()
        return versions

    @property
    def nbytes(self) -> int:
        """The bytes of the sums of all buckets."""
        return sum(b.spec.dtype.itemsize * b.numel for b in self._layout.buckets)

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
            while any(not window.values[peer, self._last] for peer in self._ranks.peers):
                check()
                if self._reducer.error is not None:
                    raise self._reducer.error
                events = window.wait_for_event(events, _WAIT_SLICE_S)
        except PeerLost as error:  # perhaps only because it lost another before
            raise window.lost_first(error).during("a merge") from error

    def release(self) -> None:
        """Let the workers end, which wait for it."""
        window = self._window
        with suppress(CommError):  # a worker that has gone needs nothing
            for peer in self._ranks.peers:
                window.put(peer, 0, None, self._last, 1)
            for peer in self._ranks.peers:
                window.flush(peer, limit=_FLUSH_S, operation="the shutdown")

    def close(self) -> None:
        """End the thread, and the window."""
        self._reducer.close()
        self._window.close()
        self._reducer.join()


def _templates(bucket: BucketLayout) -> list[Tensor]:
    """Make tensors of the shapes of a bucket's values, which take no memory."""
    dtype = bucket.spec.dtype
    return [torch.empty(length, dtype=dtype, device="meta") for length in bucket.spec.lengths]
