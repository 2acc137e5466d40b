"""Method `server`: parameter servers own all parameters and update them; workers send gradients.

    gradient_ready        put each server its part of the bucket: push
    end                   worker 0 sends the step's hyperparameters: servers may update
    server                all contributions have arrived: sum, update, put the parameters: pull
    before_read           wait for this bucket's parameters, copy them

Which version of the parameters a step waits for is the staleness: 0 (`DataParallel`), K > 0
(`BoundedStaleness`), or the worker's own last push (`Asynchronous`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from torch import nn

from paceline.algorithms.data_parallel import DataParallel
from paceline.algorithms.notified import open_puts
from paceline.algorithms.open_exchange import PutOptions
from paceline.algorithms.served.asynchronous import Asynchronous, WorkersMean
from paceline.algorithms.served.bounded_staleness import BoundedStaleness
from paceline.algorithms.served.served_optimizer import ServedOptimizer
from paceline.algorithms.served.served_update import ServedUpdate
from paceline.algorithms.sharded import ShardedState
from paceline.reduce.buckets import Bucket
from paceline.update.batch_norm import RunningStatistics


def make_served(
    buckets: Sequence[Bucket],
    optimizer: ServedOptimizer,
    statistics: RunningStatistics,
    options: PutOptions,
    *,
    staleness: int | None = 0,
    mean: WorkersMean | None = None,
) -> DataParallel:
    """Make a worker's synchronizer; collective of workers and servers.

    Args:
        buckets: the buckets of parameters, which the servers own.
        optimizer: this worker's.
        statistics: the model's running statistics, exchanged in every step unless `staleness` is
            None.
        options: of the exchange.
        staleness: versions by which the parameters of a step may be behind. None: each worker's
            push is a version of its own, and the exchange is one of this worker and the servers.
        mean: as of `Asynchronous`.

    Raises:
        CommError: a worker or a server didn't come in time, or can't be reached.
    """
    own = statistics
    if staleness is None:
        statistics = RunningStatistics(nn.Module())  # each worker has its own
    slots = 1 + (staleness or 0)
    opened = open_puts(buckets, statistics, options, returns_parameters=True, slots=slots)
    exchange = opened.own
    assert exchange is not None
    with ExitStack() as undo:
        undo.callback(exchange.close)  # the servers that are left notice that this worker leaves
        optimizer.connect(exchange.messages)
        undo.pop_all()
    rule = ServedUpdate(buckets, exchange, optimizer, asynchronous=staleness is None)
    state = ShardedState(opened.residuals, optimizer)
    if staleness:
        return BoundedStaleness(
            buckets, exchange, rule, statistics, opened.startup, state, options.timeline, staleness
        )
    if staleness is None:
        return Asynchronous(
            buckets, exchange, rule, own, opened.startup, state, options.timeline, mean
        )
    return DataParallel(
        buckets, opened.exchange, rule, statistics, opened.startup, state, options.timeline
    )
