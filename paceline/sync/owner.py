"""Adds up shards in rank order and puts the sums back: this rank's part as an owner.

    peers' parts land in the window ─┐
                                     ├─ all there ─▶ sum, in rank order ─▶ put to every peer
    this rank's own part is packed ──┘

A thread does it, so that a sum goes out while this rank computes. A version counts the exchanges of
a run. Nothing is acknowledged, because it is implied: a peer sends version v + 1 of a run only
after it has read version v's sum of every shard, so whoever gets a part of v + 1 knows that the
sender needs nothing of v any more.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from paceline.comm.window import Window
from paceline.errors import CommError, PacelineError
from paceline.sync.layout import Layout, Run

_PATIENCE_S = 0.5


class Owner:
    """Owns this rank's shard of every run.

    Args:
        window: this rank's; nobody else uses it.
        layout: of the window, the same on all ranks.
        limit: seconds to wait for a peer.

    Attributes:
        packed: this rank's values of each run, (numel,): what `send` sends.
        sums: the sums of each run, (numel,), once `wait` has returned.
    """

    def __init__(self, window: Window, layout: Layout, limit: float) -> None:
        self._window, self._layout, self._limit = window, layout, limit
        self._peers = [peer for peer in range(window.world_size) if peer != window.rank]
        self.packed = [torch.zeros(run.numel, dtype=run.dtype) for run in layout.runs]
        self.sums = [_values(window, run.sum, run.numel, run.dtype) for run in layout.runs]
        self._parts = [self._parts_of(run) for run in layout.runs]
        self._changed = threading.Condition()
        self._sent = [0] * len(layout.runs)  # versions
        self._summed = [0] * len(layout.runs)
        self._waited = [0] * len(layout.runs)
        self._error: PacelineError | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="owner", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Expect a step; runs have versions, so there is nothing to do."""

    def next(self, index: int) -> int:
        """Return the run itself: none arrives in an order."""
        return index

    def send(self, index: int) -> None:
        """Put this rank's parts of a run to their owners, the more urgent the sooner it is read."""
        run = self._layout.runs[index]
        version = self._sent[index] + 1
        for peer in self._peers:
            part = self.packed[index][run.shard(peer)]
            where = run.part(self._window.rank)
            self._window.put(peer, where, part, index, version, -index)
        with self._changed:
            self._sent[index] = version
        self._window.nudge()

    def wait(self, index: int, operation: str) -> None:
        """Return once the sums of all shards of a run's last version are there.

        Raises:
            CommError: a peer was lost, or silent.
        """
        version = self._waited[index] = self._sent[index]
        for peer in self._peers:
            row = len(self._layout.runs) + index
            self._window.wait(peer, row, version, limit=self._limit, operation=operation)
        with self._changed:
            self._changed.wait_for(
                lambda: self._summed[index] >= version or self._error is not None, self._limit
            )
            if self._summed[index] < version:
                assert self._error is not None, f"no sum of run {index}, and no error"
                raise self._error

    def close(self) -> None:
        """End the thread, and the window; after a good end, once the peers have all their sums."""
        with self._changed:
            self._closed = True
        if self._waited == self._sent:
            with suppress(CommError):  # a peer that has gone needs nothing
                for peer in self._peers:
                    self._window.flush(peer, limit=self._limit, operation="the last sums")
        self._window.close()
        self._thread.join()

    def _parts_of(self, run: Run) -> list[Tensor]:
        """All ranks' parts of this rank's shard, in rank order."""
        rank = self._window.rank
        shard = run.shard(rank)
        size = shard.stop - shard.start
        return [
            self.packed[run.index][shard]
            if sender == rank
            else _values(self._window, run.part(sender), size, run.dtype)
            for sender in range(self._window.world_size)
        ]

    def _work(self) -> None:
        news = 0
        try:
            while not self._closed:
                for index in self._complete():
                    self._add(index)
                news = self._window.wait_for_news(news, _PATIENCE_S)
        except PacelineError as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _complete(self) -> list[int]:
        """Return the runs of which all parts are there."""
        values = self._window.values
        return [
            index
            for index, (summed, sent) in enumerate(zip(self._summed, self._sent, strict=True))
            if sent > summed and all(values[peer, index] > summed for peer in self._peers)
        ]

    def _add(self, index: int) -> None:
        run, version = self._layout.runs[index], self._summed[index] + 1
        own = self.sums[index][run.shard(self._window.rank)]
        _sum(self._parts[index], own)
        for peer in self._peers:
            row = len(self._layout.runs) + index
            where = run.sum_of(self._window.rank)
            self._window.put(peer, where, own, row, version, -index)
        with self._changed:
            self._summed[index] = version
            self._changed.notify_all()


def _sum(parts: Sequence[Tensor], out: Tensor) -> None:
    """Add parts up in their order."""
    if len(parts) == 1:
        out.copy_(parts[0])
        return
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out += part


def _values(window: Window, at: int, numel: int, dtype: torch.dtype) -> Tensor:
    """View values in the window's memory."""
    return window.memory[at : at + numel * dtype.itemsize].view(dtype)
