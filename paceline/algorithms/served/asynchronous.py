"""Asynchronous SGD: each worker's push is a version of its own, in each server's order of arrival.

    worker 0     push ─ pull ── push ─ pull ── push ─ pull
    worker 1     push ────── pull ────── push ────── pull
    server       0 1 0 0 1 …                                 one update a push

A worker waits for the servers alone, and for no other worker. Its gradients are as many updates old
as other workers have made since its last pull. Running statistics are its own.

Where all workers meet, each has the servers' present parameters, and the mean of the statistics:

    settle ── meet: all have pushed ── pull ── … ── meet: all have pulled ── next push
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
from paceline.timeline.timeline import Timeline
from paceline.update.batch_norm import RunningStatistics

Meet = Callable[[Tensor], Tensor]
"""Returns the mean of the workers' tensors, (values,) of float64; collective."""


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
        meet: of the workers; None: the caller lets them meet.
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
        meet: Meet | None = None,
    ) -> None:
        apart = RunningStatistics(nn.Module())  # none are exchanged in a step
        super().__init__(buckets, exchange, rule, apart, startup, state, timeline)
        self._served = rule
        self._own_statistics = statistics
        self._meet = meet
        self._meeting = False  # others may still pull what was there when all met

    def begin(self, step: StepInfo) -> None:
        """Start a step: its gradients are the mean over this worker's samples."""
        if self._meeting and self._meet is not None:
            self._meeting = False
            self._meet(torch.zeros(1, dtype=torch.float64))
        super().begin(step._replace(weight=1.0 if step.weight else 0.0))

    def settle(self, weights: Weights = Weights.OWN) -> None:
        """Install what the last push returns.

        Args:
            weights: `MERGED` are the servers' present parameters, pulled once all have settled.
        """
        super().settle(weights)
        if weights is Weights.MERGED and self._ended:
            self._await_all()
            self._awaited.update(self._served.pull())
            super().settle(weights)
            self.reads.update(self._served.take_staleness())

    def _await_all(self) -> None:
        """Return once all workers have settled; running statistics are their mean then."""
        if self._meet is None:
            return
        statistics = self._own_statistics
        statistics.pack()
        flat = statistics.flat
        mean = self._meet(torch.zeros(1, dtype=torch.float64) if flat is None else flat.double())
        if flat is not None:
            statistics.replace(mean.to(flat.dtype))
        self._meeting = True
