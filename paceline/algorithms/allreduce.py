"""`allreduce`: every rank sums each bucket's gradients with all others and updates its whole copy.

A bucket's all_reduce starts in backward as soon as its gradients are complete, and is awaited by
the first layer of the next forward that reads the bucket. All ranks issue in one order, the
running statistics and then the buckets by their numbers, because collectives are matched by order:
a bucket that is complete out of turn waits for its turn, and nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.algorithms.data_parallel import DataParallel
from paceline.comm.communicator import Communicator
from paceline.recorder import Recorder
from paceline.reduce.buckets import Bucket
from paceline.reduce.collectives import Collectives
from paceline.update.batch_norm import RunningStatistics
from paceline.update.updater import Updater


class AllReduce(DataParallel):
    """A synchronizer on collectives, of NCCL or Gloo."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        communicator: Communicator,
        updater: Updater,
        statistics: RunningStatistics,
        recorder: Recorder | None = None,
    ) -> None:
        exchange = Collectives(buckets, communicator, statistics.flat)
        world_size = communicator.world_size
        super().__init__(buckets, exchange, updater, statistics, world_size, recorder)
