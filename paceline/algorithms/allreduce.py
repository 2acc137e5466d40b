"""`allreduce`: an all-reduce of each bucket's gradients, and an update of every rank's whole copy.

A bucket's all-reduce starts in backward as soon as its gradients are complete, and the first layer
of the next forward that reads the bucket waits for it. All ranks issue in one order, the running
statistics and then the buckets by their numbers, because collectives are matched by order. A bucket
that is complete out of turn is issued in its turn, and `send` doesn't wait for that.

In a world of one rank nothing is exchanged, and `end` updates.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.algorithms.data_parallel import DataParallel
from paceline.comm.communicator import Communicator
from paceline.comm.peer_activities import Startup
from paceline.reduce.buckets import Bucket
from paceline.reduce.collectives import Collectives
from paceline.reduce.dense_and_rows import dense_of, with_rows
from paceline.reduce.exchange import Exchange
from paceline.reduce.no_exchange import NoExchange
from paceline.timeline.timeline import Timeline
from paceline.update.batch_norm import RunningStatistics
from paceline.update.updater import OwnStep, Updater


def make_allreduce(
    buckets: Sequence[Bucket],
    communicator: Communicator,
    updater: Updater | OwnStep,
    statistics: RunningStatistics,
    timeline: Timeline | None = None,
    startup: Startup | None = None,
    rows: Communicator | None = None,
) -> DataParallel:
    """Make a synchronizer that uses NCCL or Gloo collectives.

    Args:
        buckets: the buckets of parameters whose gradients are exchanged.
        communicator: connects all ranks.
        updater: updates the parameters.
        statistics: the model's running statistics, exchanged in every step.
        timeline: as of `DataParallel`.
        startup: ended once, after the first step; by default the communicator's.
        rows: connects all ranks to exchange row-sparse gradients; None: there are none.
    """
    dense = dense_of(buckets)
    alone = communicator.world_size == 1
    exchange: Exchange = NoExchange(len(dense))
    if not alone:
        exchange = Collectives(dense, communicator, statistics.flat)
    return DataParallel(
        buckets,
        with_rows(exchange, buckets, rows, timeline),
        updater,
        statistics,
        startup or communicator,
        timeline=timeline,
        alone=alone,
    )
