"""Opens the exchange by puts that a method's options ask for, over a window of its own.

CPU memory            PutExchange
GPU memory            GpuStaging ── PutExchange
GPUs that sum first   MachineSums ── PutExchange, of a machine's first worker
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.codecs.codec import Codec
from paceline.comm.communicator import Communicator
from paceline.comm.peer_activities import NO_PEERS, PeerActivities, Timeout
from paceline.comm.window import Window
from paceline.recorder import NullRecorder, Recorder
from paceline.reduce.buckets import mostly_tables
from paceline.reduce.exchange import Exchange
from paceline.reduce.gpu_staging import GpuStaging, pinned_like
from paceline.reduce.machine_sums import MachineSums
from paceline.reduce.put_engine.layout import BucketSpec, Layout, Topology, lay_out
from paceline.reduce.put_engine.put_exchange import PutExchange
from paceline.reduce.residuals import EncodedBucket, Residuals

OpenWindow = Callable[[int, int], Window]  # of a size and a number of notifications


@dataclass(frozen=True, kw_only=True)
class PutOptions:
    """Settings of an exchange by puts.

    Attributes:
        open_window: opens this rank's window; collective. Ranks of one group share their windows'
            memory.
        topology: the groups of ranks; gradients are first summed inside each group.
        limits: seconds to wait for a peer: one value for the first step, and one for later steps.
        activities: what the peers do; they may extend a wait.
        end_startup: called once, after the first step.
        codec: encodes float32 gradients that are sent between groups; None: they are unencoded.
        return_codec: encodes the sums that return, where there is a codec; None: the same does.
        error_decay: what part of a residual the next step adds to its values.
        recorder: receives the same spans and counts as the recorder of `DataParallel`.
        staged: whether parameters are in GPU memory, so that gradients are copied through CPU
            memory.
        machine: communicator of this group's ranks, or None. If it is given, its collectives
            sum the gradients on the GPUs; only the group's first rank copies the sums to the CPU
            and exchanges them through its window.
        rows: connects all ranks to exchange row-sparse gradients; None: there are none.
        announce: called with the window's layout before the window is opened: invites a server.
        tables: parameters whose gradients may be zero but for some rows. Buckets of which more than
            half of the values are in tables suppress zeros in puts between groups.
        bucket_mb: bucket size in MiB, for checkpoints of the residuals.
    """

    open_window: OpenWindow
    topology: Topology
    limits: tuple[float, float]
    activities: PeerActivities = NO_PEERS
    end_startup: Callable[[], None] = lambda: None
    codec: Codec | None = None
    return_codec: Codec | None = None
    error_decay: float = 1.0
    recorder: Recorder = field(default_factory=NullRecorder)
    staged: bool = False
    machine: Communicator | None = None
    rows: Communicator | None = None
    announce: Callable[[Layout], None] = lambda layout: None
    tables: frozenset[Tensor] = frozenset()
    bucket_mb: float = 0.0


@dataclass(frozen=True, kw_only=True)
class OpenedExchange:
    """An exchange by puts, and what its user needs besides.

    Attributes:
        exchange: exchanges the buckets.
        own: the exchange by this rank's window; None if another rank of the machine has the window.
        residuals: this rank's residuals; None without a codec or without other machines.
        end_startup: to be called once, after the first exchange.
    """

    exchange: Exchange
    own: PutExchange | None
    residuals: Residuals | None
    end_startup: Callable[[], None]


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
        options: of the exchange.
        count: number of buckets of parameters; behind them there may be one of running statistics.

    Raises:
        CommError: a rank didn't come in time, or can't be reached.
    """
    topology = options.topology
    machine = options.machine
    put_topology = topology if machine is None else topology.leaders
    layout = lay_out(specs, put_topology)
    options.announce(layout)
    window = options.open_window(layout.size, layout.notifications)
    timeout = Timeout(*options.limits, options.activities)
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

    def end_startup() -> None:
        timeout.end_startup()
        if machine is not None:
            machine.end_startup()
        options.end_startup()

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
    return OpenedExchange(
        exchange=exchange, own=put_exchange, residuals=residuals, end_startup=end_startup
    )


def bucket_spec(
    tensors: Sequence[Tensor], options: PutOptions, *, returns_parameters: bool = False
) -> BucketSpec:
    """Describe the bucket of some tensors of one dtype."""
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
        suppresses_zeros=mostly_tables(tensors, options.tables),
    )
