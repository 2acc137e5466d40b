"""A model bound to weight averaging, with an exchange by puts.

Where the averaging server is lost, the workers open one more generation among themselves, in which
they gather the state that all hold, save it, and end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.algorithms.average import Averaging
from paceline.algorithms.method import BucketPlan, Method
from paceline.algorithms.open_average import open_average, size_of_buckets
from paceline.algorithms.open_exchange import PutOptions
from paceline.codecs.merge_codecs import merge_codec, return_codec
from paceline.config.world import SyncConfig
from paceline.errors import ServerLost
from paceline.generation.context import GenerationContext
from paceline.generation.run import Run
from paceline.reduce.buckets import Bucket
from paceline.replica.replica import Replica
from paceline.replica.trained_parameters import TrainedParameters, table_parameters
from paceline.server.found_servers import FoundServers, find_averaging_server
from paceline.update.batch_norm import RunningStatistics
from paceline.update.outer.average import Average
from paceline.wiring.exchange import topology_of, window_of

MERGES = "merges"  # purpose of the window


class AverageBuilder:
    """Builder of the averaging of one model's weights, through the workers or a server.

    Args:
        model: the same on all ranks but for its values.
        optimizer: of the model's parameters.
        run: the run, whose ranks merge their weights.
        config: how the changes of weights travel.
        average: when and how they are merged.
        steps: the number of the run's steps, if it is known.
        server: merges; None: the workers do.

    Attributes:
        changes: False: there is one method.
    """

    changes = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        run: Run,
        config: SyncConfig,
        average: Average,
        steps: int | None,
        server: FoundServers | None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._run = run
        self._config = config
        self._average = average
        self._steps = steps
        self._server = server
        self._device = next(model.parameters(), torch.empty(0)).device
        parameters = TrainedParameters.of(model, optimizer).groups
        size = size_of_buckets(parameters, config.bucket_bytes, average.fragments)
        self._plan = BucketPlan(bucket_bytes=size, dense=True)

    def plan(self, *, begins: bool) -> BucketPlan | None:
        """Return the only plan when a generation begins."""
        return self._plan if begins else None

    def method(self, buckets: Sequence[Bucket], context: GenerationContext) -> Method:
        """Open the merges; among the workers alone, once the run has lost its server."""
        statistics = RunningStatistics(self._model)
        try:
            merges = self._open(buckets, statistics, context, self._server)
        except ServerLost as lost:
            assert self._server is not None
            merges = self._open(buckets, statistics, context, None)
            merges.ends = _end_of(self._server, lost)
        context.keep("synchronizer", merges)
        return Method.by_rounds(merges)

    def _open(
        self,
        buckets: Sequence[Bucket],
        statistics: RunningStatistics,
        context: GenerationContext,
        server: FoundServers | None,
    ) -> Averaging:
        config = self._config
        average = self._average
        topology = topology_of(context, alone=config.transport == "nixl")  # it shares no memory
        if server is not None:
            topology = topology.served_by(*server.names)
        rule = average.rule.for_workers(context.along("data").size)
        codec = merge_codec(config.wire)
        options = PutOptions(
            context=context,
            purpose=MERGES,
            window=window_of(config, self._run),
            servers=None if server is None else server.link(context, MERGES),
            topology=topology,
            startup=context,
            codec=codec,
            return_codec=return_codec(codec, len(topology.groups)),
            error_decay=rule.error_decay,
            recorder=self._run.recorder,
            timeline=self._run.timeline,
            staged=self._device.type != "cpu",
            tables=table_parameters(self._model),
        )
        return open_average(
            buckets,
            statistics,
            options,
            rule,
            average.schedule(self._steps),
            fragments=average.fragments,
            mix=average.mix,
            averaged=self._optimizer if average.momenta == "average" else None,
            forgets=self._optimizer if average.momenta == "reset" else None,
        )


def _end_of(server: FoundServers, lost: ServerLost) -> ServerLost:
    """Return the error of the run's end without its server."""
    (name,) = server.names
    reason = str(lost).removeprefix(f"{name} ").rstrip(".")
    return ServerLost(
        f"the run has lost {name}, and ends without it ({reason}). Start the same command again."
    )


def average_weights(
    model: nn.Module,
    optimizer: Optimizer,
    run: Run,
    config: SyncConfig,
    average: Average,
    steps: int | None = None,
) -> Replica:
    """Give all ranks rank 0's model, and let them train it locally; collective.

    The arguments are those of `AverageBuilder`.

    Raises:
        ConfigError: there are more fragments than buckets, there are no momenta to average, or
            the run can't have a server.
        CommError: a peer was lost, or silent, or no server came.
    """
    server = None
    if average.through == "server":
        server = find_averaging_server(run, model, config, average)
    builder = AverageBuilder(model, optimizer, run, config, average, steps, server)
    return Replica(model, optimizer, run, builder)
