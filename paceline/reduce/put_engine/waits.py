"""A rank's waits for its peers' words, each within a limit; and whom they were in vain for.

A sum needs all ranks. So a wait for one peer ends as well when another is lost, and one that nobody
answers names who hasn't sent its part, rather than the owner that waits for it as well.
"""

from __future__ import annotations

import time

from paceline.comm.window import Window
from paceline.errors import CommTimeout, PeerLost
from paceline.reduce.put_engine.rank_layout import RankLayout
from paceline.reduce.put_engine.shard_reducer import ShardReducer

_WAIT_SLICE_S = 0.5  # until a lost rank is noticed by who waits for another


class Waits:
    """Waits for runs' versions.

    Args:
        window: where peers notify.
        rank_layout: of this rank.
        reducer: of this rank.
        count: of the runs.
        limit: seconds.

    Attributes:
        limit: seconds that a wait may take.
    """

    def __init__(
        self,
        window: Window,
        rank_layout: RankLayout,
        reducer: ShardReducer,
        count: int,
        limit: float,
    ) -> None:
        self.limit = limit
        self._window, self._rank_layout, self._reducer, self._count = (
            window,
            rank_layout,
            reducer,
            count,
        )

    def notification(self, peer: int, row: int, version: int, operation: str) -> None:
        """Wait for a peer's notification of a run, or of its sum or flags.

        Raises:
            PeerLost: a peer ended, this one or another; CommTimeout: one was silent.
        """
        deadline = time.monotonic() + self.limit
        while True:
            limit = min(_WAIT_SLICE_S, deadline - time.monotonic())
            try:
                self._window.wait(peer, row, version, limit=limit, operation=operation)
                return
            except CommTimeout:
                self.raise_reducer_error(operation)
                if time.monotonic() >= deadline:
                    raise self._silence(row % self._count, version, operation, peer) from None
            except PeerLost:  # perhaps only because it lost another before
                self.raise_reducer_error(operation)
                raise

    def reducer(self, index: int, version: int, operation: str) -> None:
        """Wait until this rank's own slice of a run is done; raises as `notification`."""
        if not self._reducer.wait(index, version, self.limit):
            self.raise_reducer_error(operation)
            raise self._silence(index, version, operation, None)

    def drain(self, limit: float) -> None:
        """Say that this rank has all that it needs, and return once all others have said so.

        It returns as well at the limit, and when another goes on: then its next wait is to learn
        at once that this rank doesn't.

        Raises:
            CommError: a peer has gone.
        """
        window, last = self._window, 3 * self._count
        peers = self._rank_layout.peers
        window.subscribe(last + 1)
        for peer in peers:
            window.put(peer, 0, None, last, 1)
        deadline, events = time.monotonic() + limit, 0
        while staying := [peer for peer in peers if not window.values[peer, last]]:
            goes_on = (window.values[staying, : self._count] > self._reducer.sent).any()
            if goes_on or self._reducer.error is not None or time.monotonic() >= deadline:
                return
            events = window.wait_for_event(events, _WAIT_SLICE_S)
        for peer in peers:
            window.flush(peer, limit=limit, operation="the end")

    def raise_reducer_error(self, operation: str) -> None:
        """Raise what ended the adder, if anything did: it noticed first who was lost."""
        error = self._reducer.error
        if isinstance(error, PeerLost):
            raise PeerLost(str(error).replace("waiting for news", operation)) from error
        if error is not None:
            raise error

    def _silence(self, index: int, version: int, operation: str, owner: int | None) -> CommTimeout:
        rank_layout, values = self._rank_layout, self._window.values
        peer_owners = [*rank_layout.peer_owners.values()]
        silent = [
            peer
            for peer in (*rank_layout.group_peers, *peer_owners)
            if values[peer, index] < version
        ]
        if not silent:  # they have sent their parts, and a sum is missing
            missing = [p for p in peer_owners if values[p, self._count + index] < version]
            silent = missing if owner is None else [owner]
        ranks = ", ".join(map(str, sorted(silent)))
        who = f"rank{'s' if len(silent) > 1 else ''} {ranks}" if silent else "itself"
        return CommTimeout(
            f"rank {rank_layout.rank} waited {self.limit:g} s for {who} in "
            f"{operation}: it hangs, can't be reached, or needs a longer --timeout "
            "(--first_iter_timeout in the start)."
        )
