"""The table of synchronizers by `--sync`, and a model bound to one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.algorithms.allreduce import make_allreduce
from paceline.algorithms.method import Method
from paceline.algorithms.notified import make_notified
from paceline.algorithms.open_exchange import PutOptions
from paceline.algorithms.sharded import make_sharded
from paceline.algorithms.synchronizer import GradientSynchronizer
from paceline.codecs.codecs import CODECS
from paceline.comm.communicator import Communicator
from paceline.config.world import SyncConfig
from paceline.errors import ConfigError, Message
from paceline.generation.context import GenerationContext, WindowSpec
from paceline.generation.run import Run
from paceline.reduce.buckets import ALL, Bucket
from paceline.reduce.dense_and_rows import dense_of
from paceline.reduce.put_engine.layout import Topology
from paceline.replica.binder import ExchangePlan, MakeMethod
from paceline.replica.buffer_broadcast import BufferBroadcast
from paceline.replica.earlier_buffers import computed_buffers
from paceline.replica.grouped_replica import GroupedReplica
from paceline.replica.pass_spans import watch_passes
from paceline.replica.replica import Replica
from paceline.replica.trained_parameters import (
    TrainedParameters,
    row_sparse_parameters,
    table_parameters,
)
from paceline.run.autotune.autotuner import Autotuner, TrialSetting
from paceline.run.autotune.prediction import StepPredictor
from paceline.update.batch_norm import BatchShare, RunningStatistics
from paceline.update.shard_optimizer import ShardOptimizer
from paceline.update.updater import make_updater
from paceline.wiring.candidates import candidates_of
from paceline.wiring.connections import adds_up_on_gpus, refuse_shared_gpu
from paceline.wiring.pairs import Pair


class ExchangeGroups:
    """Groups of the ranks that exchange one pair of a model and an optimizer; collective.

    Args:
        run: the run, which opens them in later generations, too.
        model: the model, which may have row-sparse gradients.
        sync: the method, as it was given: "auto" may sum by collectives.
        index: of the pair among several; None: it is the only one.

    Attributes:
        run: as given.
        model: as given.
        steps: purpose of the group for what the host knows.
        gradients: purpose of the group for collectives where the model is; `steps` where a method
            has none.

    Raises:
        ConfigError: the method needs NCCL, which doesn't connect ranks that share a GPU.
        CommError: a rank didn't come in time.
    """

    def __init__(self, run: Run, model: nn.Module, sync: str, index: int | None = None) -> None:
        refuse_shared_gpu(run.context.sharing, sync)
        number = "" if index is None else f"/{index}"
        self.run = run
        self.model = model
        self._sync = sync
        self._machine = f"gradients{number}"
        self.steps = f"steps{number}"
        self.gradients = f"gradients{number}" if sync in ("auto", "allreduce") else self.steps
        self._rows = f"rows{number}" if row_sparse_parameters(model) else None
        for purpose in filter(None, (self.steps, self.gradients, self._rows)):
            run.open("data", purpose)

    @property
    def rows(self) -> Communicator | None:
        """Connects all ranks for row-sparse gradients; None: there are none."""
        return None if self._rows is None else self.run.context.group("data", self._rows)

    def open_machine(self) -> Communicator | None:
        """Connect the workers of each machine, where their GPUs sum first; else return None."""
        context = self.run.context
        sums = adds_up_on_gpus(context, self._sync)
        return context.group("machine", self._machine) if sums else None

    def end_startup(self) -> None:
        """Use the shorter timeouts of later steps from now on."""
        self.run.context.end_startup(self.steps, self.gradients)


_MakeSynchronizer = Callable[
    [Sequence[Bucket], Optimizer, RunningStatistics, SyncConfig, ExchangeGroups],
    GradientSynchronizer,
]


def _allreduce(
    buckets: Sequence[Bucket],
    optimizer: Optimizer,
    statistics: RunningStatistics,
    config: SyncConfig,
    groups: ExchangeGroups,
) -> GradientSynchronizer:
    run = groups.run
    return make_allreduce(
        buckets,
        run.context.group("data", groups.gradients),
        make_updater(optimizer, buckets),
        statistics,
        run.recorder,
        groups.end_startup,
        groups.rows,
    )


def _notified(
    buckets: Sequence[Bucket],
    optimizer: Optimizer,
    statistics: RunningStatistics,
    config: SyncConfig,
    groups: ExchangeGroups,
) -> GradientSynchronizer:
    run = groups.run
    context = run.context
    machine = groups.open_machine()
    window = WindowSpec(
        transport=config.transport,
        connections=config.connections or 1,
        trace=run.trace,
        leaders=machine is not None,
    )
    options = PutOptions(
        open_window=partial(context.window, "gradients", window),
        # NIXL shares no memory.
        topology=topology_of(context, alone=config.transport == "nixl" and machine is None),
        limits=context.limits,
        activities=context.activities,
        end_startup=groups.end_startup,
        codec=CODECS[config.wire],
        recorder=run.recorder,
        staged=any(p.device.type != "cpu" for bucket in buckets for p in bucket.parameters),
        machine=machine,
        rows=groups.rows,
        tables=table_parameters(groups.model),
        bucket_mb=config.bucket_bytes / 2**20,
    )
    if config.update == "sharded":
        return make_sharded(buckets, ShardOptimizer(optimizer, buckets), statistics, options)
    return make_notified(buckets, make_updater(optimizer, buckets), statistics, options)


def topology_of(context: GenerationContext, *, alone: bool) -> Topology:
    """Return the groups of ranks that share memory: those of a machine, or each rank alone."""
    lines = context.mesh.lines("machine")
    return Topology(groups=tuple((r,) for line in lines for r in line) if alone else lines)


# What makes a synchronizer of a model's buckets, by the names of `config.world.METHODS`.
SYNCHRONIZERS: dict[str, _MakeSynchronizer] = {"allreduce": _allreduce, "notified": _notified}


def _method(buckets: Sequence[Bucket], config: SyncConfig, run: Run) -> str:
    """Return the method: `config.sync`, but `allreduce` for `notified` without anything to put.

    No put carries tables, and one rank exchanges nothing.
    """
    if config.sync != "notified":
        return config.sync
    only_rows = bool(buckets) and not dense_of(buckets) and config.update != "sharded"
    return "allreduce" if only_rows or _alone(config, run) else config.sync


def _alone(config: SyncConfig, run: Run) -> bool:
    """Return whether nothing is exchanged: one rank updates the whole model."""
    return run.context.along("data").size == 1 and config.update != "sharded"


def _plan(config: SyncConfig, run: Run, bind: MakeMethod) -> ExchangePlan:
    size = ALL if _alone(config, run) else config.bucket_bytes
    return ExchangePlan(make_method=bind, bucket_bytes=size)


def refuse_gpu(config: SyncConfig) -> None:
    """Refuse options for which no method exchanges what is in a GPU's memory.

    Args:
        config: the options.

    Raises:
        ConfigError: there is no such method.
    """
    if config.update == "sharded":
        raise ConfigError(
            Message(
                "{--update} sharded supports CPUs only, but this run uses GPUs; use {--update} "
                "replicated, or CPUs with {--use_cpu}."
            )
        )
    if config.shares == "measured":
        raise ConfigError(
            Message(
                "{--shares} measured supports CPUs only, because GPUs' waits aren't measured; "
                "leave out {--shares}, or use CPUs with {--use_cpu}."
            )
        )
    if config.put_options and config.sync not in ("notified", "average"):
        flag = config.put_options[0]
        raise ConfigError(
            Message(
                f"{{--{flag}}} {{}} needs {{--sync}} notified, which {{--sync}} {{}} does not try "
                f"on GPUs; set {{--sync}} notified, or leave out {{--{flag}}}.",
                getattr(config, flag),
                config.sync,
            )
        )


def check_shares(config: SyncConfig, workers: int) -> None:
    """Refuse shares by measured speed where there is one worker.

    Args:
        config: the options.
        workers: number of workers of the run.

    Raises:
        ConfigError: there is only one.
    """
    if config.shares == "measured" and workers == 1:
        raise ConfigError(
            flag="shares",
            value=config.shares,
            rule="there is only one worker, which trains the whole batch",
            remedy=Message("start several workers, or leave out {--shares}"),
        )


def replicate(
    model: nn.Module,
    optimizer: Optimizer,
    run: Run,
    config: SyncConfig,
    share: BatchShare | None = None,
    setting: TrialSetting | None = None,
    *,
    buffers: str = "broadcast",
) -> Replica:
    """Give all ranks rank 0's model and bind it to a synchronizer; collective.

    Args:
        model: the same on all ranks but for its values.
        optimizer: of the model's parameters, or others too.
        run: the run, whose ranks exchange.
        config: how they exchange gradients; "auto" is resolved in the first steps.
        share: this rank's share of each step, with which SyncBatchNorm layers were made.
        setting: context of autotuning.
        buffers: "broadcast": each step ends with rank 0's buffers on all ranks; "local": they are
            each rank's own.

    Raises:
        ConfigError: model or optimizer can't be exchanged.
        CommError: a peer was lost, or silent.
    """
    groups = ExchangeGroups(run, model, config.sync)

    def plan(config: SyncConfig) -> ExchangePlan:
        def bind(buckets: Sequence[Bucket]) -> Method:
            statistics = RunningStatistics(model)
            names = [bucket.names for bucket in buckets]
            if statistics.flat is not None:
                names.append(("the running statistics",))
            run.recorder.event("buckets", parameters=names)
            make = SYNCHRONIZERS[_method(buckets, config, run)]
            made = make(buckets, optimizer, statistics, config, groups)
            run.context.keep("synchronizer", made)
            return Method.by_gradients(made)

        return _plan(config, run, bind)

    def next_plan() -> ExchangePlan | None:
        config = autotuner.next()
        return None if config is None else plan(config)

    trained = TrainedParameters.of(model, optimizer)
    device = next((p.device for p in trained.groups), torch.device("cpu"))
    machines = run.context.world.generation.workers_per_machine
    candidates = candidates_of(config, trained, machines, device, run.context.sharing)
    predictor: StepPredictor | None = None
    if len(candidates) > 1 and device.type == "cpu":
        predictor = StepPredictor(candidates, model, lambda: replica, run)
    autotuner = Autotuner(candidates, run, setting or TrialSetting(), predictor)
    replica = Replica(
        model,
        optimizer,
        run,
        lambda: plan(autotuner.begin_generation()),
        share=share,
        next_plan=next_plan if len(candidates) > 1 else None,
        buffers=_broadcast(model, run) if buffers == "broadcast" else None,
    )
    if predictor is not None:
        replica.on_close(predictor.restart)
    if run.trace is not None:
        run.trace.resources.callback(watch_passes(model, run.trace))
    return replica


def _broadcast(model: nn.Module, run: Run) -> BufferBroadcast:
    """Make what broadcasts a model's buffers; collective on GPUs, where it has any."""
    if next(computed_buffers(model), None) is not None:
        run.open("data", "buffers")
    return BufferBroadcast(model, run)


def replicate_grouped(pair: Pair, index: int, run: Run, given: SyncConfig) -> GroupedReplica:
    """Bind one of several models and optimizers; as `replicate`.

    Args:
        pair: a model, the same on all ranks but for its values, and an optimizer.
        index: of the pair among all.
        run: the run, whose ranks exchange.
        given: how they exchange gradients; "auto" is "allreduce" where that fits the options,
            without trials.
    """
    model = pair.model
    optimizer = pair.optimizer
    groups = ExchangeGroups(run, model, given.sync, index)

    def bind(buckets: Sequence[Bucket]) -> Method:
        run.recorder.event("buckets", parameters=[bucket.names for bucket in buckets])
        no_statistics = RunningStatistics(nn.Module())  # the replica exchanges them apart
        make = SYNCHRONIZERS[_method(buckets, config, run)]
        made = make(buckets, optimizer, no_statistics, config, groups)
        run.context.keep(f"synchronizer/{index}", made)
        return Method.by_gradients(made)

    trained = TrainedParameters.of(model, optimizer, pair.scope)
    device = next((p.device for p in trained.groups), torch.device("cpu"))
    machines = run.context.world.generation.workers_per_machine
    candidates = candidates_of(given, trained, machines, device, run.context.sharing)
    config = next((c for c in candidates if c.sync == "allreduce"), candidates[0])
    replica = GroupedReplica(
        model,
        optimizer,
        run,
        lambda: _plan(config, run, bind),
        share=pair.share,
        scope=pair.scope,
        purpose=groups.steps,
        gradients=groups.gradients,
        buffers=_broadcast(model, run) if pair.buffers == "broadcast" else None,
    )
    if run.trace is not None and pair.scope.first:
        run.trace.resources.callback(watch_passes(model, run.trace))
    return replica
