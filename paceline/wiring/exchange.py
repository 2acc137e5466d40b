"""Connects a worker with the others and binds a model to a synchronizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import torch
from torch import nn
from torch._C._distributed_c10d import PrefixStore, Store
from torch.optim import Optimizer

from paceline.algorithms.allreduce import make_allreduce
from paceline.algorithms.notified import PutOptions, make_notified
from paceline.algorithms.sharded import make_sharded
from paceline.algorithms.synchronizer import Synchronizer
from paceline.cluster.membership.members import Members
from paceline.codecs.codecs import CODECS
from paceline.comm.communicator import Communicator, gather_bytes
from paceline.comm.connection_window import connect_window
from paceline.comm.nixl.window import nixl_window
from paceline.comm.process_group import ProcessGroupCommunicator
from paceline.comm.traced_window import TracedWindow
from paceline.comm.transport.bootstrap import Bootstrap
from paceline.comm.window import Window
from paceline.config.train import TrainConfig
from paceline.config.world import SyncConfig
from paceline.errors import ConfigError, Message
from paceline.observe.trace.step_trace import MARKS, Trace
from paceline.recorder import NullRecorder, Recorder
from paceline.reduce.buckets import Bucket
from paceline.reduce.put_engine.layout import Topology
from paceline.replica.pass_spans import watch_passes
from paceline.replica.replica import ExchangePlan, Replica
from paceline.replica.trained_parameters import TrainedParameters
from paceline.update.batch_norm import BatchShare, RunningStatistics
from paceline.update.shard_optimizer import ShardOptimizer
from paceline.update.updater import Updater
from paceline.wiring.autotune import Chooser, TrialSetting, candidates_of


@dataclass(frozen=True, kw_only=True)
class Peers:
    """How a worker reaches the others.

    Attributes:
        members: the world.
        token: the job token.
        limits: seconds to wait for them, at the start and later.
        communicator: connects them.
        device: where the communicator's tensors live.
        recorder: measures the exchange.
        trace: traces it, if it is to be traced.
        intra_machine: connects the workers of this machine, where their GPUs add up first.
    """

    members: Members
    token: str
    limits: tuple[float, float]
    communicator: Communicator
    device: torch.device = field(default_factory=partial(torch.device, "cpu"))
    recorder: Recorder = field(default_factory=NullRecorder)
    trace: Trace | None = None
    intra_machine: Communicator | None = None
    _windows: Iterator[int] = field(default_factory=count)

    def open_window(
        self, size: int, notifications: int, *, transport: str = "tcp", connections: int = 1
    ) -> Window:
        """Open a window, shared with the workers of this machine but by NIXL; collective.

        Where GPUs add up first, one worker a machine has peers there.

        Raises:
            ConfigError: NIXL isn't installed.
            CommError: a rank didn't come in time, or can't be reached.
        """
        members, number = self.members, next(self._windows)
        exchanging = self.topology if self.intra_machine is None else self.topology.leaders
        alone = members.rank not in exchanging.ranks
        bootstrap = Bootstrap(
            share=self._share,
            rank=members.rank,
            world_size=members.world_size,
            token=self.token,
            purpose=f"generation/{members.generation}/window/{number}",
            limit=self.limits[1 if number else 0],  # later all have just spoken
            only=(members.rank,) if alone else exchanging.ranks,
        )
        where = (members.address, size, notifications)
        if transport == "nixl":  # which doesn't tell when puts leave and arrive
            window: Window = nixl_window(bootstrap, *where)
        else:
            group_peers = (members.rank,) if alone else exchanging.groups[members.machine]
            marks = MARKS if self.trace else 0
            window = linked = connect_window(bootstrap, group_peers, *where, marks, connections)
            if self.trace is not None:
                self.trace.follow(number, lambda: linked.moments)
        return window if self.trace is None else TracedWindow(window, number, self.trace)

    def _share(self, text: str) -> list[str]:
        """Tell all ranks a text, by the connections that stand: the store may be gone by now."""
        what = "the addresses of windows"
        told = gather_bytes(self.communicator, text.encode(), self.device, what)
        return [data.decode() for data in told]

    @property
    def topology(self) -> Topology:
        """Workers of a machine are a group."""
        return Topology.of(self.members.machines)


def _allreduce(
    buckets: Sequence[Bucket],
    peers: Peers,
    optimizer: Optimizer,
    statistics: RunningStatistics,
    config: SyncConfig,
) -> Synchronizer:
    updater = Updater(optimizer, buckets)
    return make_allreduce(buckets, peers.communicator, updater, statistics, peers.recorder)


def _notified(
    buckets: Sequence[Bucket],
    peers: Peers,
    optimizer: Optimizer,
    statistics: RunningStatistics,
    config: SyncConfig,
) -> Synchronizer:
    alone = config.transport == "nixl" and peers.intra_machine is None  # it shares no memory
    options = PutOptions(
        open_window=partial(
            peers.open_window, transport=config.transport, connections=config.connections or 1
        ),
        topology=Topology.flat(peers.members.world_size) if alone else peers.topology,
        limits=peers.limits,
        steady=peers.communicator.steady,
        codec=CODECS[config.wire],
        recorder=peers.recorder,
        staged=any(p.device.type != "cpu" for bucket in buckets for p in bucket.parameters),
        intra_machine=peers.intra_machine,
    )
    if config.update == "sharded":
        return make_sharded(buckets, ShardOptimizer(optimizer, buckets), statistics, options)
    return make_notified(buckets, Updater(optimizer, buckets), statistics, options)


UPDATES = ("replicated", "sharded")
TRANSPORTS = ("tcp", "nixl")
SYNCHRONIZERS = {"allreduce": _allreduce, "notified": _notified}


def refuse_gpu(config: SyncConfig) -> None:
    """Look whether there is a method that exchanges what is in a GPU's memory.

    Args:
        config: what was asked for.

    Raises:
        ConfigError: there isn't.
    """
    if config.update == "sharded":
        raise ConfigError(
            Message(
                "{--update} sharded updates in the CPU's memory only, and this run computes on "
                "GPUs; give {--update} replicated, or compute on CPUs by {--use_cpu}."
            )
        )
    if config.asks_for_puts and config.sync != "notified":
        given = next(
            flag
            for flag in ("wire", "transport", "connections")
            if getattr(config, flag) != getattr(SyncConfig(), flag)
        )
        raise ConfigError(
            Message(
                f"{{--{given}}} {{}} needs {{--sync}} notified, which is not among what {{}} tries "
                f"on GPUs; give {{--sync}} notified, or no {{--{given}}}.",
                getattr(config, given),
                config.sync,
            )
        )


def device_of(config: TrainConfig, local_rank: int) -> torch.device:
    """Return the device of a machine's worker."""
    if config.world.use_cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    if config.world.gpu_numbers:
        return torch.device("cuda", config.world.gpu_numbers[local_rank])
    if torch.cuda.device_count() == 1:  # a scheduler may show each worker its own only
        return torch.device("cuda", 0)
    return torch.device("cuda", local_rank)


def connect(
    config: TrainConfig, members: Members, store: Store, device: torch.device
) -> Communicator:
    """Connect this worker with all others of its generation; collective.

    Raises:
        CommError: a rank didn't come in time.
    """
    return _connect("steps", config, members, store, device)


def connect_layers(
    config: TrainConfig, members: Members, store: Store, device: torch.device
) -> Communicator | None:
    """Connect the layers that exchange within forward and backward, if there are; collective.

    Raises:
        CommError: a rank didn't come in time.
    """
    if not config.model.sync_bn:
        return None
    return _connect("layers", config, members, store, device)


def replicate(
    model: nn.Module,
    optimizer: Optimizer,
    peers: Peers,
    config: SyncConfig,
    share: BatchShare | None = None,
    setting: TrialSetting | None = None,
) -> Replica:
    """Give all ranks rank 0's model and bind it to a synchronizer; collective.

    Args:
        model: the same on all ranks but for its values.
        optimizer: of the model's parameters, or others too.
        peers: the ranks.
        config: how they exchange gradients; "auto" is chosen in the first steps.
        share: what the model's SyncBatchNorm layers were made with.
        setting: what there is to choose by.

    Raises:
        ConfigError: model or optimizer can't be exchanged.
        CommError: a peer was lost, or silent.
    """

    def plan(config: SyncConfig) -> ExchangePlan:
        def make(buckets: Sequence[Bucket]) -> Synchronizer:
            statistics = RunningStatistics(model)
            names = [bucket.names for bucket in buckets]
            if statistics.flat is not None:
                names.append(("the running statistics",))
            peers.recorder.event("buckets", parameters=names)
            return SYNCHRONIZERS[config.sync](buckets, peers, optimizer, statistics, config)

        return ExchangePlan(make_synchronizer=make, bucket_bytes=config.bucket_bytes)

    def next_plan() -> ExchangePlan | None:
        config = chooser.next()
        return None if config is None else plan(config)

    members, communicator = peers.members, peers.communicator
    trained = TrainedParameters.of(model, optimizer)
    device = next((p.device for p in trained.groups), torch.device("cpu"))
    candidates = candidates_of(config, trained, members.machines, device)
    chooser = Chooser(candidates, members, communicator, device, setting or TrialSetting())
    first = plan(chooser.first)
    replica = Replica(
        model,
        optimizer,
        communicator,
        first.make_synchronizer,
        bucket_bytes=first.bucket_bytes,
        share=share,
        next_plan=next_plan,
    )
    if peers.trace is not None:
        peers.trace.resources.callback(watch_passes(model, peers.trace))
    return replica


def _connect(
    purpose: str, config: TrainConfig, members: Members, store: Store, device: torch.device
) -> Communicator:
    return ProcessGroupCommunicator(
        PrefixStore(f"generation/{members.generation}/{purpose}", store),
        rank=members.rank,
        world_size=members.world_size,
        device=device,
        address=members.address,
        first_timeout=config.world.first_iter_timeout,
        timeout=config.world.timeout,
    )
