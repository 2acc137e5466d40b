"""The table of synchronizers by `--sync`, and a model bound to one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from paceline.algorithms.allreduce import make_allreduce
from paceline.algorithms.data_parallel import DataParallel
from paceline.algorithms.method import BucketPlan, Method
from paceline.algorithms.notified import make_notified
from paceline.algorithms.open_exchange import PutOptions
from paceline.algorithms.served.bounded_staleness import slots_note
from paceline.algorithms.served.served_optimizer import SERVED, ServedOptimizer
from paceline.algorithms.served.synchronizer import make_served
from paceline.algorithms.sharded import make_sharded
from paceline.algorithms.synchronizer import GradientSynchronizer
from paceline.codecs.codecs import CODECS
from paceline.comm.communicator import Communicator, broadcast_all, require_same_call, total
from paceline.config.world import SyncConfig
from paceline.errors import ConfigError, Message, many
from paceline.generation.context import GenerationContext, WindowSpec
from paceline.generation.run import Run
from paceline.reduce.buckets import ALL, Bucket
from paceline.reduce.dense_and_rows import dense_of
from paceline.reduce.put_engine.layout import Topology, most_shards
from paceline.replica.buffer_broadcast import BufferBroadcast
from paceline.replica.earlier_buffers import computed_buffers
from paceline.replica.grouped_replica import GroupedReplica
from paceline.replica.live_hooks import before_scaler_calls
from paceline.replica.pass_spans import watch_passes
from paceline.replica.replica import Replica
from paceline.replica.trained_parameters import (
    TrainedParameters,
    row_sparse_parameters,
    table_parameters,
)
from paceline.run.autotune.autotuner import Autotuner, TrialSetting
from paceline.run.autotune.prediction import StepPredictor
from paceline.run.autotune.server_proposal import ServerProposal
from paceline.server.found_servers import FoundServers, find_parameter_servers
from paceline.update.batch_norm import BatchShare, RunningStatistics, SyncBatchNorm
from paceline.update.divided_optimizer import require_divisible
from paceline.update.master_weights import NARROW, narrow, require_float32
from paceline.update.shard_optimizer import SHARDED, ShardOptimizer
from paceline.update.updater import ELEMENTWISE, is_bucketwise, make_updater
from paceline.wiring.candidates import candidates_of
from paceline.wiring.connections import adds_up_on_gpus, refuse_shared_gpu
from paceline.wiring.pairs import Pair

_ASYNCHRONOUS_LEAD = 15  # steps: one more is the largest lead, which summaries bound
_NO_MEMORY = 64  # bytes of a window without peers


class ExchangeGroups:
    """Groups of the ranks that exchange one pair of a model and an optimizer; collective.

    Args:
        run: the run, which opens them in later generations, too.
        model: the model, which may have row-sparse gradients.
        sync: the method, as it was given: "auto" may sum by collectives.
        index: of the pair among several; None: it is the only one.
        servers: own the model's parameters; None: there are none.

    Attributes:
        servers: those that have not been lost.
        steps: purpose of the group for what the host knows.
        gradients: purpose of the group for collectives where the model is; `steps` where a method
            has none.

    Raises:
        ConfigError: the method needs NCCL, which doesn't connect ranks that share a GPU.
    """

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        sync: str,
        index: int | None = None,
        servers: FoundServers | None = None,
    ) -> None:
        refuse_shared_gpu(run.context.sharing, sync)
        number = "" if index is None else f"/{index}"
        self.run = run
        self.model = model
        self.servers = servers
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
        run.timeline,
        groups,
        groups.rows,
    )


def _notified(
    buckets: Sequence[Bucket],
    optimizer: Optimizer,
    statistics: RunningStatistics,
    config: SyncConfig,
    groups: ExchangeGroups,
) -> GradientSynchronizer:
    options = _put_options(buckets, config, groups)
    if config.update == "sharded":
        shards = ShardOptimizer(optimizer, buckets, masters=config.narrow)
        return make_sharded(buckets, shards, statistics, options)
    return make_notified(buckets, make_updater(optimizer, buckets), statistics, options)


def _served(
    buckets: Sequence[Bucket],
    optimizer: Optimizer,
    statistics: RunningStatistics,
    config: SyncConfig,
    groups: ExchangeGroups,
) -> GradientSynchronizer:
    options = _put_options(buckets, config, groups)
    context = options.context
    servers = _remaining_servers(groups)
    if not servers.names:
        return make_sharded(buckets, ShardOptimizer(optimizer, buckets), statistics, options)
    refuse_idle_servers(buckets, len(servers.names))
    staleness = config.versions_behind
    if staleness != 0:
        context.allow_lead(_ASYNCHRONOUS_LEAD if staleness is None else staleness)
    served = ServedOptimizer(optimizer, buckets)
    with ExitStack() as undo:
        undo.callback(served.close)
        if staleness is None:
            made = _asynchronous(buckets, served, statistics, options, servers)
        else:
            options = replace(
                options,
                servers=servers.link(context, options.purpose),
                topology=options.topology.served_by(*servers.names),
            )
            made = make_served(buckets, served, statistics, options, staleness=staleness)
            if staleness and (note := slots_note(served.layout, staleness)) is not None:
                groups.run.note(note, shown=groups.run.leads)
        undo.pop_all()
    return made


def _asynchronous(
    buckets: Sequence[Bucket],
    optimizer: ServedOptimizer,
    statistics: RunningStatistics,
    options: PutOptions,
    servers: FoundServers,
) -> DataParallel:
    """Make the synchronizer of an asynchronous worker; each has a window with all servers."""
    context = options.context
    world = context.world
    mean = partial(workers_mean, context.group("all", "steps"))
    made: DataParallel | None = None
    for worker in range(world.size):
        link = servers.link(context, options.purpose, worker)
        window = replace(options.window, worker=worker, servers=link)
        if worker != world.rank:  # which takes part in opening the window alone
            link.invite(None)
            context.window(options.purpose, window, _NO_MEMORY, 1).close()
            continue
        topology = Topology(groups=((worker,),)).served_by(*servers.names, first=world.size)
        own = replace(options, window=window, servers=link, topology=topology)
        made = make_served(buckets, optimizer, statistics, own, staleness=None, mean=mean)
    assert made is not None
    return made


def workers_mean(communicator: Communicator, tensor: Tensor) -> Tensor:
    """Return the mean of all workers' tensors, of float64; collective, so also a barrier.

    Raises:
        ConfigError: a rank is elsewhere, after a `break` of its own say; names it.
        CommError: a peer was lost, or silent.
    """
    barrier = "a barrier of asynchronous workers"
    require_same_call(communicator, barrier, "", barrier)
    return total(communicator, tensor, barrier) / communicator.world_size


def _remaining_servers(groups: ExchangeGroups) -> FoundServers:
    """Return the servers that are left in this generation, and note which were lost; collective."""
    before = groups.servers
    assert before is not None
    groups.servers = left = before.remaining(groups.run.context)
    if lost := [name for name in before.names if name not in left.names]:
        owners = "the workers" if not left.names else many(len(left.names), "server")
        note = f"lost {' and '.join(lost)}: all parameters are owned by {owners} from now on"
        note += ", without staleness." if before.config.stale and not left.names else "."
        groups.run.note(note, shown=groups.run.leads)
    return left


def refuse_idle_servers(buckets: Sequence[Bucket], count: int) -> None:
    """Refuse more servers than the largest bucket can be cut into.

    Raises:
        ConfigError: some servers would own nothing.
    """
    parts = max((most_shards(bucket.parameters) for bucket in buckets), default=count)
    if count > parts:
        raise ConfigError(
            flag="num_servers",
            value=count,
            rule=f"the model's largest bucket can be cut into {many(parts, 'part')} only, so that "
            "some servers would own nothing",
            remedy=Message("use at most {}, or a larger {--bucket_mb}", parts),
        )


def _put_options(
    buckets: Sequence[Bucket], config: SyncConfig, groups: ExchangeGroups
) -> PutOptions:
    """Return the options of an exchange by puts among the workers."""
    run = groups.run
    context = run.context
    machine = groups.open_machine()
    return PutOptions(
        context=context,
        purpose="gradients",
        window=replace(window_of(config, run), leaders=machine is not None),
        # NIXL shares no memory.
        topology=topology_of(context, alone=config.transport == "nixl" and machine is None),
        startup=groups,
        codec=CODECS[config.wire],
        recorder=run.recorder,
        timeline=run.timeline,
        staged=any(p.device.type != "cpu" for bucket in buckets for p in bucket.parameters),
        machine=machine,
        rows=groups.rows,
        tables=table_parameters(groups.model),
        bucket_mb=config.bucket_bytes / 2**20,
    )


def window_of(config: SyncConfig, run: Run) -> WindowSpec:
    """Return how the ranks of a window are reached."""
    return WindowSpec(transport=config.transport, connections=config.connections or 1)


def topology_of(context: GenerationContext, *, alone: bool) -> Topology:
    """Return the replicas' groups that share memory: those of a machine, or each rank alone."""
    lines = context.mesh.machines_along("data", context.world.rank)
    return Topology(groups=tuple((r,) for line in lines for r in line) if alone else lines)


# What makes a synchronizer of a model's buckets, by the names of `config.world.METHODS`.
SYNCHRONIZERS: dict[str, _MakeSynchronizer] = {
    "allreduce": _allreduce,
    "notified": _notified,
    "server": _served,
}


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
    exchanges = config.update == "sharded" or config.sync == "server"
    return run.context.along("data").size == 1 and not exchanges


class ExchangeBuilder:
    """Builder of the methods that exchange the gradients of one model and its optimizer.

    Args:
        groups: of the ranks that exchange them.
        autotuner: selects the exchange.
        normalised: the model whose running statistics are exchanged with the gradients.
        purpose: of what the context keeps.
        changes: whether the autotuner may select another exchange within a generation.
    """

    def __init__(
        self,
        groups: ExchangeGroups,
        optimizer: Optimizer,
        autotuner: Autotuner,
        normalised: nn.Module,
        purpose: str = "synchronizer",
        *,
        changes: bool = False,
    ) -> None:
        self.changes = changes
        self._groups = groups
        self._run = groups.run
        self._optimizer = optimizer
        self._autotuner = autotuner
        self._normalised = normalised
        self._purpose = purpose
        self._config: SyncConfig | None = None

    def plan(self, *, begins: bool) -> BucketPlan | None:
        """Return the plan of the exchange that the autotuner selects."""
        config = self._autotuner.begin_generation() if begins else self._autotuner.next()
        if config is None:
            return None
        self._config = config
        size = ALL if _alone(config, self._run) else config.bucket_bytes
        return BucketPlan(bucket_bytes=size)

    def method(self, buckets: Sequence[Bucket], context: GenerationContext) -> Method:
        """Make the synchronizer of the selected exchange."""
        config = self._config
        assert config is not None
        statistics = RunningStatistics(self._normalised)
        names = [bucket.names for bucket in buckets]
        if statistics.flat is not None:
            names.append(("the running statistics",))
        self._run.recorder.event("buckets", parameters=names)
        make = SYNCHRONIZERS[_method(buckets, config, self._run)]
        made = make(buckets, self._optimizer, statistics, config, self._groups)
        context.keep(self._purpose, made)
        return Method.by_gradients(made)


def replicate(
    model: nn.Module,
    optimizer: Optimizer,
    run: Run,
    config: SyncConfig,
    share: BatchShare | None = None,
    setting: TrialSetting | None = None,
    *,
    buffers: str = "broadcast",
    proposal: ServerProposal | None = None,
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
        proposal: of a server, to a run that is without one; None: nothing is proposed.

    Raises:
        ConfigError: model or optimizer can't be exchanged, or a server refuses the run.
        CommError: a peer was lost, or silent, or a server didn't come.
    """
    servers = None
    if config.sync == "server":
        require_divisible(optimizer, SERVED)  # before the wait for servers
        servers = find_parameter_servers(run, model, optimizer, config)
    groups = ExchangeGroups(run, model, config.sync, servers=servers)
    trained = TrainedParameters.of(model, optimizer)
    if config.narrow:
        trained = _narrow(model, optimizer, trained, config, groups)
    if servers is not None:
        values = sum(p.numel() for p in trained.groups if p.requires_grad)
        workers = many(run.context.world.size, "worker")
        note = f"{many(values, 'value')} of {workers}, updated by {servers.optimizer}"
        run.note(f"{note} on {' and '.join(servers.names)}.", shown=run.leads)
    device = next((p.device for p in trained.groups), torch.device("cpu"))
    machines = run.context.world.generation.workers_per_machine
    candidates = candidates_of(config, trained, machines, device, run.context.sharing)
    if run.context.mesh.divided:  # stages have models of their own, and no trials together
        candidates = [_untried(candidates)]
    predictor: StepPredictor | None = None
    if len(candidates) > 1 and device.type == "cpu":
        served = proposal if _may_be_stale(model, optimizer, trained, config) else None
        predictor = StepPredictor(candidates, model, run, served)
    autotuner = Autotuner(candidates, run, setting or TrialSetting(), predictor)
    replica = Replica(
        model,
        optimizer,
        run,
        ExchangeBuilder(groups, optimizer, autotuner, model, changes=len(candidates) > 1),
        share=share,
        buffers=_broadcast(model, run) if buffers == "broadcast" else None,
    )
    if config.param_dtype == "float16":
        replica.on_close(before_scaler_calls(optimizer, _refuse_scaler))
    if predictor is not None:
        predictor.watch(replica)
    if run.timeline.traced:
        replica.on_close(watch_passes(model, run.timeline))
    return replica


def _narrow(
    model: nn.Module,
    optimizer: Optimizer,
    trained: TrainedParameters,
    config: SyncConfig,
    groups: ExchangeGroups,
) -> TrainedParameters:
    """Store rank 0's parameters in 16 bits, with masters; collective. Return what is trained."""
    require_divisible(optimizer, SHARDED)
    require_float32(trained.names, config.param_dtype)
    communicator = groups.run.context.group("data", groups.steps)
    broadcast_all(communicator, list(trained.names), "the broadcast of rank 0's weights")
    narrow(trained.names, optimizer, NARROW[config.param_dtype])
    return TrainedParameters.of(model, optimizer)


def _refuse_scaler(_: GradScaler) -> None:
    raise ConfigError(
        "a GradScaler is used with param_dtype='float16', whose gradients of 16 bits would be "
        "unscaled in 16 bits: use param_dtype='bfloat16', or no GradScaler."
    )


def _may_be_stale(
    model: nn.Module, optimizer: Optimizer, trained: TrainedParameters, config: SyncConfig
) -> bool:
    """Return whether servers could train a model with workers that are in different steps."""
    synchronised = any(isinstance(module, SyncBatchNorm) for module in model.modules())
    updated = type(optimizer) in ELEMENTWISE and is_bucketwise(optimizer)
    return updated and not (synchronised or trained.row_sparse or config.put_options)


def _broadcast(model: nn.Module, run: Run) -> BufferBroadcast:
    """Make what broadcasts a model's buffers; collective on GPUs, where it has any."""
    if next(computed_buffers(model), None) is not None:
        run.open("data", "buffers")
    return BufferBroadcast(model, run)


def _untried(candidates: Sequence[SyncConfig]) -> SyncConfig:
    """Return the candidate that is used where none is tried."""
    return next((c for c in candidates if c.sync == "allreduce"), candidates[0])


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
    trained = TrainedParameters.of(model, optimizer, pair.scope)
    device = next((p.device for p in trained.groups), torch.device("cpu"))
    machines = run.context.world.generation.workers_per_machine
    candidates = candidates_of(given, trained, machines, device, run.context.sharing)
    autotuner = Autotuner([_untried(candidates)], run, TrialSetting())
    apart = nn.Module()  # the replica exchanges running statistics apart
    replica = GroupedReplica(
        model,
        optimizer,
        run,
        ExchangeBuilder(groups, optimizer, autotuner, apart, f"synchronizer/{index}"),
        share=pair.share,
        scope=pair.scope,
        purpose=groups.steps,
        gradients=groups.gradients,
        buffers=_broadcast(model, run) if pair.buffers == "broadcast" else None,
    )
    if run.timeline.traced and pair.scope.first:
        replica.on_close(watch_passes(model, run.timeline))
    return replica
