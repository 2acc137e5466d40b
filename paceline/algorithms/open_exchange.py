"""Opens the exchange by puts that a method's options ask for, over a window of its own.

CPU memory            PutExchange
GPU memory            GpuStaging ── PutExchange
GPUs that sum first   MachineSums ── PutExchange, of a machine's first worker
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from paceline.codecs.codec import Codec
from paceline.comm.communicator import Communicator
from paceline.comm.peer_activities import Startup, Timeout
from paceline.generation.context import GenerationContext, WindowSpec
from paceline.generation.gathered_addresses import Servers
from paceline.recorder import NullRecorder, Recorder
from paceline.reduce.buckets import mostly_tables
from paceline.reduce.exchange import Exchange
from paceline.reduce.gpu_staging import GpuStaging, pinned_like
from paceline.reduce.machine_sums import MachineSums
from paceline.reduce.put_engine.layout import BucketSpec, Layout, Topology, lay_out
from paceline.reduce.put_engine.put_exchange import PutExchange
from paceline.reduce.residuals import EncodedBucket, Residuals
from paceline.timeline.timeline import Timeline


class InvitedServers(Servers, Protocol):
    """Protocol of servers that open their windows when the workers invite them."""

    def invite(self, layout: Layout) -> None:
        """Invite the servers to a window of this layout; collective.

        Raises:
            ConfigError: they refuse to serve the run.
            CommError: they don't answer; or a peer was lost, or silent.
            ServerLost: a later generation can't be served.
        """


@dataclass(frozen=True, kw_only=True)
class PutOptions:
    """Settings of an exchange by puts.

    Attributes:
        context: the generation's context, which opens the window; has the timeouts.
        purpose: of the window.
        window: how the ranks of the window are reached, except its servers.
        servers: own all shards; None: the ranks do.
        topology: the groups of ranks; gradients are first summed inside each group, whose windows
            share their memory.
        startup: what ends after the first step, besides the startup of the exchange itself.
        codec: encodes float32 gradients that are sent between groups; None: they are unencoded.
        return_codec: encodes the sums that return, where there is a codec; None: the same does.
        error_decay: what part of a residual the next step adds to its values.
        recorder: receives the events of the exchange.
        timeline: as that of `DataParallel`.
        staged: whether parameters are in GPU memory, so that gradients are copied through CPU
            memory.
        machine: communicator of this group's ranks, or None. If it is given, its collectives
            sum the gradients on the GPUs; only the group's first rank copies the sums to the CPU
            and exchanges them through its window.
        rows: connects all ranks to exchange row-sparse gradients; None: there are none.
        tables: parameters whose gradients may be zero but for some rows. Buckets of which more than
            half of the values are in tables suppress zeros in puts between groups.
        wide: indices of the buckets that owners sum in float32, whose values have 16 bits.
        bucket_mb: bucket size in MiB, for checkpoints of the residuals.
    """

    context: GenerationContext
    purpose: str
    window: WindowSpec = field(default_factory=WindowSpec)
    servers: InvitedServers | None = None
    topology: Topology
    startup: Startup | None = None
    codec: Codec | None = None
    return_codec: Codec | None = None
    error_decay: float = 1.0
    recorder: Recorder = field(default_factory=NullRecorder)
    timeline: Timeline = field(default_factory=Timeline)
    staged: bool = False
    machine: Communicator | None = None
    rows: Communicator | None = None
    tables: frozenset[Tensor] = frozenset()
    wide: frozenset[int] = frozenset()
    bucket_mb: float = 0.0


@dataclass(frozen=True)
class ExchangeStartup:
    """Startup of an exchange: that of all waits in which its first step passes.

    Attributes:
        parts: end together.
    """

    parts: Sequence[Startup]

    def end_startup(self) -> None:
        """Use the timeouts of later steps from now on."""
        for part in self.parts:
            part.end_startup()


@dataclass(frozen=True, kw_only=True)
class OpenedExchange:
    """An exchange by puts, and what its user needs besides.

    Attributes:
        exchange: exchanges the buckets.
        own: the exchange by this rank's window; None if another rank of the machine has the window.
        residuals: this rank's residuals; None without a codec or without other machines.
        startup: to be ended once, after the first exchange.
    """

    exchange: Exchange
    own: PutExchange | None
    residuals: Residuals | None
    startup: ExchangeStartup


def open_exchange(
    templates: Sequence[Sequence[Tensor]],
    names: Sequence[Sequence[str]],
    specs: Sequence[BucketSpec],
    options: PutOptions,
    *,
    count: int,
) -> OpenedExchange:
    """Open a window, and an exchange of buckets over it; collective.

    Args:
        templates: for each bucket, tensors of the shapes and strides of its values.
        names: for each bucket, the names of these.
        specs: describe the buckets.
        count: number of buckets of parameters; behind them there may be one of running statistics.

    Raises:
        CommError: a rank didn't come in time, or can't be reached.
    """
    topology = options.topology
    machine = options.machine
    put_topology = topology if machine is None else topology.leaders
    layout = lay_out(specs, put_topology)
    context = options.context
    if options.servers is not None:
        options.servers.invite(layout)
    spec = replace(options.window, servers=options.servers)
    window = context.window(options.purpose, spec, layout.size, layout.notifications)
    timeout = Timeout(*context.limits, context.activities)
    options.recorder.event("notifications", texts=layout.notification_names)
    put_exchanges: list[PutExchange] = []  # this rank's, if it exchanges by its window

    def make_put_exchange(values: Sequence[Sequence[Tensor]]) -> PutExchange:
        put_exchanges.append(PutExchange(window, layout, values, names, timeout))
        return put_exchanges[0]

    exchange: Exchange
    if machine is not None:
        ranks = topology.groups[topology.group_of(window.rank)]
        exchange = MachineSums(ranks, machine, make_put_exchange, templates, names, count, timeout)
        if not put_exchanges:
            window.close()  # it has no peers
    elif options.staged:
        pinned = [[pinned_like(tensor) for tensor in tensors] for tensors in templates]
        exchange = GpuStaging(make_put_exchange(pinned), templates, pinned, names, timeout)
    else:
        exchange = make_put_exchange(templates)

    put_exchange = put_exchanges[0] if put_exchanges else None
    feedbacks = put_exchange.feedbacks if put_exchange is not None else [None] * len(specs)
    encoded = [
        EncodedBucket(layout=bucket, templates=tensors, names=bucket_names, feedback=feedback)
        for bucket, tensors, bucket_names, feedback in zip(
            layout.buckets, templates, names, feedbacks, strict=True
        )
        if bucket.spec.codec is not None and len(put_topology.groups) > 1
    ]
    residuals = None
    if encoded:
        residuals = Residuals(encoded, put_topology.workers, window.rank, options.bucket_mb)
    starting = (timeout, machine, options.startup)
    startup = ExchangeStartup([one for one in starting if one is not None])
    return OpenedExchange(exchange=exchange, own=put_exchange, residuals=residuals, startup=startup)


def bucket_spec(
    tensors: Sequence[Tensor],
    options: PutOptions,
    *,
    returns_parameters: bool = False,
    gradients: bool = False,
) -> BucketSpec:
    """Describe the bucket of some tensors of one dtype.

    Args:
        returns_parameters: updated parameters may be sent back.
        gradients: the values are these parameters' gradients, where backward leaves them.
    """
    dtype = tensors[0].dtype
    lengths = tuple(tensor.numel() for tensor in tensors)
    codec = options.codec if dtype is torch.float32 else None
    return BucketSpec(
        lengths=lengths,
        dtype=dtype,
        codec=codec,
        return_codec=None if codec is None else options.return_codec,
        error_decay=options.error_decay,
        returns_parameters=returns_parameters,
        adopts=gradients and not options.staged and options.machine is None,
        suppresses_zeros=mostly_tables(tensors, options.tables),
    )
