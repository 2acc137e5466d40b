"""A model bound to weight averaging, with an exchange by puts.

Where the averaging server is lost, the workers open one more generation among themselves, in which
they gather the state that all hold, save it, and end.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.algorithms.average import Averaging
from paceline.algorithms.method import Method
from paceline.algorithms.open_average import open_average, size_of_buckets
from paceline.algorithms.open_exchange import PutOptions
from paceline.codecs.merge_codecs import merge_codec, return_codec
from paceline.config.world import SyncConfig
from paceline.errors import ServerLost
from paceline.generation.context import WindowSpec
from paceline.generation.run import Run
from paceline.reduce.buckets import Bucket
from paceline.replica.binder import ExchangePlan
from paceline.replica.replica import Replica
from paceline.replica.trained_parameters import TrainedParameters, table_parameters
from paceline.server.average_server import MERGES, MetServer, meet_server
from paceline.update.batch_norm import RunningStatistics
from paceline.update.outer.average import Average
from paceline.wiring.exchange import topology_of


def average_weights(
    model: nn.Module,
    optimizer: Optimizer,
    run: Run,
    config: SyncConfig,
    average: Average,
    steps: int | None = None,
) -> Replica:
    """Give all ranks rank 0's model, and let them train it locally; collective.

    Args:
        model: the same on all ranks but for its values.
        optimizer: of the model's parameters.
        run: the run, whose ranks merge their weights.
        config: how the changes of weights travel.
        average: when and how they are merged.
        steps: the number of the run's steps, if it is known.

    Raises:
        ConfigError: there are more fragments than buckets, there are no momenta to average, or
            the run can't have a server.
        CommError: a peer was lost, or silent, or no server came.
    """
    met = meet_server(run, model, config, average) if average.through == "server" else None
    codec = merge_codec(config.wire)
    device = next(model.parameters(), torch.empty(0)).device

    def make(buckets: Sequence[Bucket]) -> Method:
        statistics = RunningStatistics(model)
        try:
            merges = open_merges(buckets, statistics, met)
        except ServerLost as lost:
            merges = open_merges(buckets, statistics, None)
            merges.ends = lost
        run.context.keep("synchronizer", merges)
        return Method.by_rounds(merges)

    def open_merges(
        buckets: Sequence[Bucket], statistics: RunningStatistics, server: MetServer | None
    ) -> Averaging:
        context = run.context  # of the present generation
        topology = topology_of(context, alone=config.transport == "nixl")  # it shares no memory
        if server is not None:
            topology = topology.served_by(server.name)
        rule = average.rule.for_workers(context.along("data").size)
        window = WindowSpec(
            transport=config.transport,
            connections=config.connections or 1,
            trace=run.trace,
            servers=None if server is None else server.link(context),
        )
        options = PutOptions(
            open_window=partial(context.window, MERGES, window),
            topology=topology,
            limits=context.limits,
            activities=context.activities,
            end_startup=context.end_startup,
            codec=codec,
            return_codec=return_codec(codec, len(topology.groups)),
            error_decay=rule.error_decay,
            recorder=run.recorder,
            staged=device.type != "cpu",
            announce=lambda layout: None if server is None else server.invite(context, layout),
            tables=table_parameters(model),
        )
        return open_average(
            buckets,
            statistics,
            options,
            rule,
            average.schedule(steps),
            fragments=average.fragments,
            mix=average.mix,
            averaged=optimizer if average.momenta == "average" else None,
            forgets=optimizer if average.momenta == "reset" else None,
        )

    parameters = TrainedParameters.of(model, optimizer).groups
    size = size_of_buckets(parameters, config.bucket_bytes, average.fragments)
    plan = ExchangePlan(make_method=make, bucket_bytes=size, dense=True)
    return Replica(model, optimizer, run, lambda: plan)
