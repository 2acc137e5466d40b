"""Makes the synchronizers of workers and servers that are threads of this process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from torch.distributed import HashStore

from paceline.algorithms.data_parallel import DataParallel
from paceline.algorithms.open_exchange import PutOptions
from paceline.algorithms.served.asynchronous import WorkersMean
from paceline.algorithms.served.parameter_server import ParameterServer
from paceline.algorithms.served.served_optimizer import ServedOptimizer
from paceline.algorithms.served.synchronizer import make_served
from paceline.comm.communicator import Communicator
from paceline.comm.connection_window import connect_window
from paceline.comm.peer_activities import Timeout
from paceline.comm.transport.bootstrap import Bootstrap
from paceline.comm.window import Window
from paceline.reduce.buckets import Bucket
from paceline.reduce.put_engine.layout import FLAGS, Layout, Topology
from paceline.timeline.timeline import Timeline
from paceline.update.owned_shards import OwnedShards
from tests.harness.twins.faulty_window import Faults, FaultyWindow
from tests.harness.twins.invited_threads import InvitedThreads
from tests.harness.twins.mortal_window import Mortal, MortalWindow, SlotCounts
from tests.harness.twins.stored_addresses import StoredAddresses
from tests.harness.twins.window import WindowGroup
from tests.harness.twins.window_context import WindowContext

LIMIT = 90.0  # generous: the machine may be busy, and a fresh clone compiles the kernels


class Served:
    """Makes each worker's synchronizer, and starts the servers of each binding.

    Args:
        servers: the number of servers.
        late: puts are late and overtake each other.
        machines: how many workers share memory on each; by default each machine has one.
        limit: seconds that waits may take.
        staleness: versions by which the parameters of a step may be behind; None: the workers are
            asynchronous.
        scales_rate: as of `ParameterServer`.
        tcp: all connect by TCP; they aren't asynchronous.
        mortals: the members, by "worker" or "server" and number, which count their puts. They don't
            connect by TCP.
        mean: as of `Asynchronous`.
        timeline: of all workers; by default each has its own.

    Attributes:
        errors: what ended servers.
        running: the servers of the last binding; of asynchronous workers, those of the last worker.
        order: the asynchronous updates: server, bucket, worker, and this worker's version.
        slots: the slots that were used, of each exchange with mortals.
    """

    updater = ServedOptimizer

    def __init__(
        self,
        servers: int,
        *,
        late: bool = False,
        machines: Sequence[int] = (),
        limit: float = LIMIT,
        staleness: int | None = 0,
        scales_rate: bool = False,
        tcp: bool = False,
        mortals: Mapping[tuple[str, int], Mortal] | None = None,
        mean: WorkersMean | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self._mean = mean
        self._timeline = timeline
        self._servers = servers
        self._late = late
        self._machines = machines
        self._limit = limit
        self._staleness = staleness
        self._scales_rate = scales_rate
        self._store = HashStore() if tcp else None
        self._shared: dict[tuple[int, int], OwnedShards] = {}  # by binding and server
        self._mortals = mortals
        self.slots: dict[WindowGroup, SlotCounts] = {}
        self.order: list[tuple[int, int, int, int]] = []
        self._lock = threading.Lock()
        self._groups: dict[tuple[int, int], WindowGroup] = {}  # by binding and, if alone, worker
        self._bindings: Counter[int] = Counter()  # by worker
        self._threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []
        self.running: list[ParameterServer] = []

    def __call__(
        self, buckets: Sequence[Bucket], communicator: Communicator, *parts: Any
    ) -> DataParallel:
        """Make a worker's synchronizer."""
        worker = rank = communicator.rank
        machines = self._machines or [1] * communicator.world_size
        if self._staleness is None:  # an exchange of each worker's own
            machines = [1]
            rank = 0
        names = [f"server {number}" for number in range(self._servers)]
        with self._lock:
            binding = self._bindings[worker]
            self._bindings[worker] += 1
        key = binding, worker - rank

        def start(layout: Layout) -> None:
            with self._lock:
                if key not in self._groups and self._store is not None:
                    self._groups[key] = self._start_by_tcp(layout, binding)
                if key not in self._groups:
                    self._groups[key] = self.start(layout, machines, *key)

        def open_window(size: int, notifications: int) -> Window:
            if self._store is not None:
                return self._connect(rank, binding, (size, notifications), len(machines))
            return self._window(self._groups[key], rank, notifications, worker)

        options = PutOptions(
            context=WindowContext(open_window, self._limit),
            purpose="gradients",
            servers=InvitedThreads(self._servers, start),
            topology=Topology.of(machines).served_by(*names),
            timeline=self._timeline or Timeline(),
        )
        staleness = self._staleness
        return make_served(buckets, *parts, options, staleness=staleness, mean=self._mean)

    def join(self) -> None:
        """Wait for the servers' ends; raise what ended one."""
        self.end()
        if self.errors:
            raise self.errors[0]

    def end(self) -> None:
        """Wait for the servers' ends, within the limit."""
        for thread in self._threads:
            thread.join(self._limit)
            assert not thread.is_alive(), "a server hasn't ended"

    def start(
        self, layout: Layout, machines: Sequence[int], binding: int = 0, worker: int = 0
    ) -> WindowGroup:
        """Start the servers of a binding of the workers of some machines; return all windows.

        Args:
            layout: of the windows.
            machines: numbers of workers.
            binding: its number.
            worker: the only one, if it is asynchronous.
        """
        ranks = layout.topology.ranks
        simulated = (*machines, *[1] * self._servers)
        owners = layout.topology.owners
        size = layout.server_size
        group = WindowGroup(len(ranks), size, layout.notifications, simulated, apart=owners)
        timeout = Timeout(self._limit, self._limit)
        if self._mortals is not None:
            self.slots[group] = SlotCounts(len(layout.buckets), len(machines))
        windows = [self._window(group, server, layout.notifications) for server in owners]
        if self._staleness is None:
            self.running = [
                self._asynchronous(number, binding, worker, window, layout, timeout)
                for number, window in enumerate(windows)
            ]
        else:
            self.running = [ParameterServer(window, layout, timeout) for window in windows]
        for server in self.running:
            thread = threading.Thread(target=self._serve, args=(server,), daemon=True)
            thread.start()
            self._threads.append(thread)
        return group

    def _start_by_tcp(self, layout: Layout, binding: int) -> WindowGroup:
        """Start the servers of a binding, each in a thread in which it connects to the workers."""
        workers = len(layout.topology.contributors)
        sizes = layout.server_size, layout.notifications

        def connect_and_serve(rank: int) -> None:
            window = self._connect(rank, binding, sizes, workers)
            self._serve(ParameterServer(window, layout, Timeout(self._limit, self._limit)))

        for server in layout.topology.owners:
            thread = threading.Thread(target=connect_and_serve, args=(server,), daemon=True)
            thread.start()
            self._threads.append(thread)
        return WindowGroup(0, 0, 0)

    def _connect(self, rank: int, binding: int, sizes: tuple[int, int], workers: int) -> Window:
        assert self._store is not None
        bootstrap = Bootstrap(
            addresses=StoredAddresses(self._store),
            rank=rank,
            world_size=workers + self._servers,
            token="token",
            purpose=f"window/{binding}",
            limit=self._limit,
            only=(*range(workers), rank) if rank >= workers else (),
        )
        return connect_window(bootstrap, (rank,), "127.0.0.1", *sizes)

    def _asynchronous(
        self, number: int, binding: int, worker: int, *arguments: Any
    ) -> ParameterServer:
        """Make a server of one worker, which notes the order of updates."""
        shards = self._shared.setdefault((binding, number), OwnedShards())
        order = self.order

        class Noting(ParameterServer):
            def _update(self, index: int, version: int, *more: Any) -> None:
                with shards.lock:
                    super()._update(index, version, *more)
                    order.append((number, index, worker, version))

        return Noting(*arguments, shards, scales_rate=self._scales_rate)

    def _window(self, group: WindowGroup, rank: int, notifications: int, worker: int = 0) -> Window:
        window: Window = group.window(rank)
        if self._mortals is not None:
            server = rank - group.world_size + self._servers
            member = ("server", server) if server >= 0 else ("worker", worker)
            window = MortalWindow(window, self._mortals[member], self.slots[group])
        if not self._late:
            return window
        buckets = notifications // 4
        ordered = range(FLAGS * buckets, (FLAGS + 1) * buckets)
        if self._staleness:  # several versions may be under way
            ordered = range(notifications)
        return FaultyWindow(window, Faults(seed=rank, ordered=ordered))

    def _serve(self, server: ParameterServer) -> None:
        try:
            with closing(server):
                server.serve()
                server.release()
        except BaseException as error:
            self.errors.append(error)
