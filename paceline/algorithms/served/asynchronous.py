"""Asynchronous SGD: each worker's push is a version of its own, in each server's order of arrival.

    worker 0     push ─ pull ── push ─ pull ── push ─ pull
    worker 1     push ────── pull ────── push ────── pull
    server       0 1 0 0 1 …                                 one update a push

A worker waits for the servers alone, and for no other worker. Its gradients are as many updates old
as other workers have made since its last pull. Running statistics are its own.

Two barriers of the workers make them equal: each then has the servers' present parameters, and the
mean of the running statistics, which the first barrier computes:

    settle ── barrier: all have pushed ── pull ── … ── barrier: all have pulled ── next push
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from paceline.algorithms.served.served_update import ServedUpdate
from paceline.algorithms.served.without_sums import WithoutSums
from paceline.algorithms.synchronizer import StepInfo, Weights
from paceline.comm.peer_activities import Startup
from paceline.reduce.buckets import Bucket
from paceline.reduce.put_engine.put_exchange import PutExchange
from paceline.reduce.rank_state import RankState
from paceline.timeline.timeline import WAIT_AT_BARRIER, Timeline
from paceline.update.batch_norm import RunningStatistics

WorkersMean = Callable[[Tensor], Tensor]
"""Returns the mean of the workers' tensors, (values,) of float64; collective, so also a barrier."""


class Asynchronous(WithoutSums):
    """Synchronizer of one asynchronous worker, over an exchange of its own with the servers.

    Args:
        buckets: the buckets of parameters.
        exchange: of the worker and the servers.
        rule: lets the servers update, and installs.
        statistics: the model's running statistics.
        startup: ends after the first step.
        state: as of `DataParallel`.
        timeline: likewise.
        mean: of the workers; None: the caller makes the barriers.
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
        mean: WorkersMean | None = None,
    ) -> None:
        none = RunningStatistics(nn.Module())  # a step exchanges no statistics
        super().__init__(buckets, exchange, rule, none, startup, state, timeline)
        self._served = rule
        self._own_statistics = statistics
        self._mean = mean
        self._pulled = False  # others may still pull, so that no push may follow yet

    def begin(self, step: StepInfo) -> None:
        """Start a step: its gradients are the mean over this worker's samples."""
        if self._pulled and self._mean is not None:
            self._pulled = False
            self._mean_of(torch.zeros(1, dtype=torch.float64))
        super().begin(step._replace(weight=1.0 if step.weight else 0.0))

    def settle(self, weights: Weights = Weights.OWN) -> None:
        """Install what the last push returns.

        Args:
            weights: `MERGED`: pull the servers' present parameters, once all workers have settled.
        """
        super().settle(weights)
        if weights is Weights.MERGED and self._ended:
            self._await_all()
            self._awaited.update(self._served.pull())
            super().settle(weights)
            self.reads.update(self._served.take_staleness())

    def _await_all(self) -> None:
        """Return once all workers have settled; replace the running statistics by their mean."""
        if self._mean is None:
            return
        statistics = self._own_statistics
        statistics.pack()
        flat = statistics.flat
        own = torch.zeros(1, dtype=torch.float64) if flat is None else flat.double()
        mean = self._mean_of(own)
        if flat is not None:
            statistics.replace(mean.to(flat.dtype))
        self._pulled = True

    def _mean_of(self, tensor: Tensor) -> Tensor:
        assert self._mean is not None
        with self._timeline.span(WAIT_AT_BARRIER):
            return self._mean(tensor)
