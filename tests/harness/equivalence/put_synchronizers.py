"""Makes the synchronizers of ranks that are threads of this process and exchange by puts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed import HashStore, Store

from paceline.algorithms.data_parallel import DataParallel
from paceline.algorithms.notified import make_notified
from paceline.algorithms.open_exchange import PutOptions
from paceline.algorithms.sharded import make_sharded
from paceline.cluster.membership.generation import Group
from paceline.codecs.merge_codecs import merge_codec, return_codec
from paceline.comm.communicator import Communicator
from paceline.comm.connection_window import connect_window
from paceline.comm.transport.bootstrap import Bootstrap
from paceline.comm.window import Window
from paceline.generation.connector import connect
from paceline.generation.context import GenerationContext, WindowSpec
from paceline.reduce.buckets import Bucket
from paceline.reduce.put_engine.layout import FLAGS, Layout, Topology
from paceline.reduce.put_engine.shard_server import ShardServer
from paceline.update.shard_optimizer import ShardOptimizer
from paceline.update.updater import make_updater
from tests.harness.processes.worlds import open_context, world_of
from tests.harness.twins.communicator import ThreadGroup
from tests.harness.twins.faulty_window import Faults, FaultyWindow
from tests.harness.twins.invited_threads import InvitedThreads
from tests.harness.twins.stored_addresses import StoredAddresses
from tests.harness.twins.window import WindowGroup
from tests.harness.twins.window_context import WindowContext

LIMIT = 90.0  # generous: the machine may be busy, and a fresh clone compiles the kernels
IntraMachine = Callable[[int], Communicator]  # connects a rank with those of its machine
MakeIntraMachine = Callable[[Sequence[int]], IntraMachine]  # of machines with so many ranks


class ServerThread:
    """A server of an exchange, in a thread.

    Attributes:
        error: what ended it; None: it ended well.
        server: itself, once it is started.
    """

    name = "the averaging server"

    def __init__(self, faults: Faults | None = None) -> None:
        self._faults = faults
        self.error: BaseException | None = None
        self.server: ShardServer | None = None

    def start(self, window: Window, layout: Layout) -> None:
        """Start to serve."""
        if self._faults is not None:
            window = FaultyWindow(window, self._faults)
        self.server = ShardServer(window, layout)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        assert self.server is not None
        try:
            self.server.serve()
            self.server.release()
        except BaseException as error:
            self.error = error
        finally:
            self.server.close()

    def join(self) -> None:
        """Wait for its end."""
        self._thread.join()


def in_threads(machines: Sequence[int], limit: float = LIMIT) -> IntraMachine:
    """Connect the ranks of each machine, which are threads, with each other."""
    intra_machine: dict[int, Communicator] = {}
    for ranks in Topology.of(machines).groups:
        group = ThreadGroup(len(ranks), limit)
        intra_machine |= {rank: group.communicator(number) for number, rank in enumerate(ranks)}
    return intra_machine.__getitem__


def notified(
    faults: bool,
    machines: Sequence[int] = (),
    codec: str = "fp32",
    kind: Any = make_notified,
    limit: float = LIMIT,
    staged: bool = False,
    intra_machine: MakeIntraMachine | None = None,
    rows: IntraMachine | None = None,
    tables: Collection[str] = (),
    error_decay: float = 1.0,
    server: ServerThread | None = None,
) -> Callable[..., Any]:
    """Return what makes the synchronizer of each rank, with windows of one group a binding.

    Args:
        faults: puts are late and overtake each other.
        machines: how many ranks share memory on each; by default each machine has one rank.
        codec: between them.
        kind: `make_notified` or `make_sharded`.
        limit: seconds that waits may take.
        staged: gradients go as those of a GPU do.
        intra_machine: connects the ranks of a machine, which sum as its GPUs do.
        rows: connects each rank with all others, for row-sparse gradients.
        tables: names of parameters whose zeros are suppressed.
        error_decay: of the residuals.
        server: owns all shards, in a thread that the first rank starts.
    """
    groups: dict[int, WindowGroup] = {}
    made: Counter[int] = Counter()
    lock = threading.Lock()
    inside = None if intra_machine is None else intra_machine(machines)

    def make(buckets: Sequence[Bucket], communicator: Communicator, *parts: Any) -> Any:
        rank, world_size = communicator.rank, communicator.world_size
        topology = Topology.of(machines or [1] * world_size)
        if server is not None:
            topology = topology.served_by(server.name)

        def start_server(layout: Layout) -> None:
            assert server is not None
            with lock:
                if 0 not in groups:
                    ranks, simulated = len(topology.ranks), (*(machines or [1] * world_size), 1)
                    groups[0] = WindowGroup(
                        ranks, layout.server_size, layout.notifications, simulated
                    )
                    server.start(groups[0].window(world_size), layout)

        def open_window(size: int, notifications: int) -> Window:
            if inside is not None and rank not in topology.leaders.ranks:
                return WindowGroup(world_size, size, notifications).window(rank)
            with lock:
                number = made[rank]
                made[rank] += 1
                if number not in groups:
                    groups[number] = WindowGroup(world_size, size, notifications, machines)
            window = groups[number].window(rank)
            if not faults:
                return window
            return FaultyWindow(window, Faults(seed=rank, ordered=flags_of(notifications)))

        options = PutOptions(
            context=WindowContext(open_window, limit),
            purpose="gradients",
            servers=None if server is None else InvitedThreads(1, start_server),
            topology=topology,
            codec=merge_codec(codec),
            return_codec=return_codec(merge_codec(codec), len(topology.groups)),
            error_decay=error_decay,
            staged=staged,
            machine=inside and inside(rank),
            rows=rows and rows(rank),
            tables=frozenset(
                p
                for bucket in buckets
                for p, name in zip(bucket.parameters, bucket.names, strict=True)
                if name in tables
            ),
        )
        return kind(buckets, *parts, options)

    make.updater = ShardOptimizer if kind is make_sharded else make_updater  # type: ignore[attr-defined]
    return make


def flags_of(notifications: int) -> range:
    """Return the notifications of flags: a rank that used all parameters waits for none of them."""
    buckets = (notifications - 1) // 4  # four kinds, and the last notification
    return range(FLAGS * buckets, (FLAGS + 1) * buckets)


def notified_on_machines(machines: Sequence[int], limit: float = LIMIT) -> Callable[..., Any]:
    """Return what makes a rank's synchronizer on shared memory inside a machine, TCP outside."""
    made: Counter[int] = Counter()
    topology, store = Topology.of(machines), HashStore()

    def make(buckets: Sequence[Bucket], communicator: Communicator, *parts: Any) -> DataParallel:
        rank = communicator.rank
        made[rank] += 1
        bootstrap = Bootstrap(
            addresses=StoredAddresses(store),
            rank=rank,
            world_size=communicator.world_size,
            token="token",
            purpose=f"window/{made[rank]}",
            limit=LIMIT,
        )
        intra_machine = topology.groups[topology.group_of(rank)]
        open_window = partial(connect_window, bootstrap, intra_machine, "127.0.0.1")
        context = WindowContext(open_window, limit)
        options = PutOptions(context=context, purpose="gradients", topology=topology)
        return make_notified(buckets, *parts, options)

    return make


def notified_by_gloo(machines: Sequence[int], limit: float = LIMIT) -> Callable[..., Any]:
    """Return what makes a rank's synchronizer as for GPUs: Gloo for NCCL, TCP between machines."""
    store, contexts = HashStore(), {}

    def make(buckets: Sequence[Bucket], communicator: Communicator, *parts: Any) -> DataParallel:
        rank = communicator.rank
        if rank not in contexts:
            contexts[rank] = context_on_gloo(machines, communicator, store, limit)
        mine = contexts[rank]
        options = PutOptions(
            context=mine,
            purpose="gradients",
            window=WindowSpec(leaders=True),
            topology=Topology.of(machines),
            staged=True,
            machine=mine.group("machine", "gradients"),
        )
        return make_notified(buckets, *parts, options)

    return make


def context_on_gloo(
    machines: Sequence[int], communicator: Communicator, store: Store, limit: float
) -> GenerationContext:
    """Connect a rank with those of its machine by Gloo, as if they had GPUs."""
    device, limits = torch.device("cpu"), (limit, limit)

    def connected(group: Group, purpose: str) -> Communicator:
        if purpose == "steps":
            return communicator
        return connect(group, purpose, store=store, device=device, limits=limits)

    group = world_of(machines, communicator.rank)
    context = open_context(group, connected, device=device, limits=limits)
    context.group("machine", "gradients")
    return context


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "allreduce": dict,
    "notified": lambda: {"kind": notified(True, (1, 1))},
    "sharded": lambda: {"kind": notified(True, (1, 1), "fp32", make_sharded)},
}
"""Options of `Bench.of` for two ranks, by method; each call makes them for one run of the ranks."""
