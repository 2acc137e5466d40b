"""Asynchronous SGD: each worker's push is a version of its own, in each server's order of arrival.

    worker 0     push ─ pull ── push ─ pull ── push ─ pull
    worker 1     push ────── pull ────── push ────── pull
    server       0 1 0 0 1 …                                 one update a push

A worker waits for the servers alone, and for no other worker. Its gradients are as many updates old
as other workers have made since its last pull. Running statistics are its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.algorithms.served.served_update import ServedUpdate
from paceline.algorithms.served.without_sums import WithoutSums
from paceline.algorithms.synchronizer import StepInfo, Weights
from paceline.comm.peer_activities import Startup
from paceline.reduce.buckets import Bucket
from paceline.reduce.put_engine.put_exchange import PutExchange
from paceline.reduce.rank_state import RankState
from paceline.timeline.timeline import Timeline
from paceline.update.batch_norm import RunningStatistics


class Asynchronous(WithoutSums):
    """Synchronizer of one asynchronous worker, over an exchange of its own with the servers.

    Args:
        buckets: the buckets of parameters.
        exchange: of the worker and the servers.
        rule: lets the servers update, and installs.
        statistics: none.
        startup: ends after the first step.
        state: as of `DataParallel`.
        timeline: likewise.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        exchange: PutExchange,
        rule: ServedUpdate,
        statistics: RunningStatistics,
        startup: Startup,
        state: RankState | None,
        timeline: Timeline,
    ) -> None:
        super().__init__(buckets, exchange, rule, statistics, startup, state, timeline)
        self._served = rule

    def begin(self, step: StepInfo) -> None:
        """Start a step: its gradients are the mean over this worker's samples."""
        super().begin(step._replace(weight=1.0 if step.weight else 0.0))

    def settle(self, weights: Weights = Weights.OWN) -> None:
        """Install what the last push returns.

        Args:
            weights: `MERGED` are the servers' present parameters, pulled once all have settled.
        """
        super().settle(weights)
        if weights is Weights.MERGED and self._ended:
            self._awaited.update(self._served.pull())
            super().settle(weights)
