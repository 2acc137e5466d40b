"""`notified`: the data-parallel step over the put engine: reduce-scatter, then all-gather, by puts.

    gradient_ready        put each shard to its owner: reduce-scatter   most urgent: read first
    owner                 all contributions are there: sum, put the sums back: all-gather
    before_read           wait for this bucket's sums, update           in the next forward

There is no order of issue that all ranks must keep, so a bucket waits for nothing but itself. It
can't deadlock: a sum needs contributions only, a contribution needs its sender's backward only, and
a backward needs the sums of the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from paceline.algorithms.data_parallel import DataParallel, UpdateRule
from paceline.algorithms.open_exchange import (
    OpenedExchange,
    PutOptions,
    bucket_spec,
    open_exchange,
)
from paceline.reduce.buckets import Bucket
from paceline.reduce.dense_and_rows import dense_of, with_rows
from paceline.reduce.put_engine.put_exchange import PutExchange
from paceline.reduce.rank_state import RankState
from paceline.update.batch_norm import RunningStatistics
from paceline.update.updater import OwnStep, Updater

MakeRule = Callable[[PutExchange | None, RankState | None], tuple[UpdateRule, RankState | None]]


def make_notified(
    buckets: Sequence[Bucket],
    updater: Updater | OwnStep,
    statistics: RunningStatistics,
    options: PutOptions,
) -> DataParallel:
    """Make a synchronizer that uses puts with notifications; every rank updates its whole copy."""
    return make_with_puts(
        buckets,
        statistics,
        options,
        lambda _, residuals: (updater, residuals),
    )


def make_with_puts(
    buckets: Sequence[Bucket],
    statistics: RunningStatistics,
    options: PutOptions,
    make_rule: MakeRule,
    *,
    returns_parameters: bool = False,
) -> DataParallel:
    """Open a window, and make a synchronizer that exchanges over it.

    Args:
        buckets: what is exchanged; fewer bytes a bucket, a finer order.
        statistics: the model's running statistics, exchanged in every step.
        options: of the exchange.
        make_rule: makes the update rule and the rank state, given the exchange by this rank's
            window (None if another rank of the machine has the window) and its residuals (None
            without a codec or without other machines).
        returns_parameters: buckets may return updated parameters in place of sums.
    """
    opened = open_puts(buckets, statistics, options, returns_parameters=returns_parameters)
    rule, state = make_rule(opened.own, opened.residuals)
    return DataParallel(
        buckets,
        with_rows(opened.exchange, buckets, options.rows, options.timeline),
        rule,
        statistics,
        opened.startup,
        state,
        options.timeline,
    )


def open_puts(
    buckets: Sequence[Bucket],
    statistics: RunningStatistics,
    options: PutOptions,
    *,
    returns_parameters: bool,
    slots: int = 1,
) -> OpenedExchange:
    """Open a window, and an exchange of gradients and running statistics over it; collective.

    Args:
        buckets: what is exchanged.
        statistics: the model's running statistics.
        options: of the exchange.
        returns_parameters: buckets may return updated parameters in place of sums.
        slots: as of `BucketSpec`.
    """
    dense = dense_of(buckets)
    templates: list[list[Tensor]] = [list(bucket.parameters) for bucket in dense]
    names = [bucket.names for bucket in dense]
    specs = [
        replace(
            bucket_spec(tensors, options, returns_parameters=returns_parameters, gradients=True),
            wide=bucket.index in options.wide,
        )
        for tensors, bucket in zip(templates, dense, strict=True)
    ]
    if statistics.flat is not None:
        specs.append(bucket_spec([statistics.flat], replace(options, codec=None)))
        templates.append([statistics.flat])
        names.append(("the running statistics",))
    specs = [replace(spec, slots=slots) for spec in specs]
    return open_exchange(templates, names, specs, options, count=len(dense))
