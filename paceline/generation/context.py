"""Generation context: the connections among the ranks of one generation, closed together.

Run                 for the whole run: the present context, the recorders
└─ context          for one generation
├─ communicator  of all ranks, for what the host knows: in this machine's memory
├─ communicators of gradients, SyncBatchNorm layers, row-sparse gradients, this machine: on GPUs
├─ summaries     of steps
└─ synchronizers the present ones; each has buckets, windows and staging memory
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Self
from weakref import WeakSet

import torch

from paceline.algorithms.synchronizer import Synchronizer
from paceline.cluster.membership.generation import Group
from paceline.comm.communicator import Communicator, gather_bytes
from paceline.comm.connection_window import connect_window
from paceline.comm.nixl.window import nixl_window
from paceline.comm.peer_activities import NO_PEERS, PeerActivities
from paceline.comm.shared_gpus import find_sharing_ranks
from paceline.comm.single_rank import SingleRankCommunicator
from paceline.comm.traced_window import TracedWindow
from paceline.comm.transport.bootstrap import Bootstrap
from paceline.comm.window import Window
from paceline.generation.summaries import StepSummaries
from paceline.reduce.put_engine.layout import Topology
from paceline.timeline.step_trace import MARKS, Trace


@dataclass(frozen=True, kw_only=True)
class Links:
    """Connections of one replica's exchange.

    Attributes:
        communicator: connects all ranks, for tensors in this machine's memory.
        gradients: connects all ranks, for collectives of gradients where they are.
        intra_machine: connects the workers of this machine, if gradients are first summed there.
    """

    communicator: Communicator
    gradients: Communicator
    intra_machine: Communicator | None


@dataclass(frozen=True, kw_only=True)
class ServerLink:
    """Link to a server, which is the last rank of a window.

    Attributes:
        address: the address of this machine at which the other ranks and the server reach it.
        publish: gives the server what the ranks have gathered; called on rank 0.
    """

    address: str
    publish: Callable[[Sequence[str]], None]


class GenerationContext:
    """Generation context: what lives as long as one generation of the world.

    As a context manager, it closes with the block, and aborts if the block fails.

    Args:
        group: all ranks of the generation.
        connect: connects the ranks of a group for a purpose, for tensors in this machine's memory;
            collective, once a purpose.
        device: the device on which this rank computes.
        limits: timeouts in seconds: one for the start and the first step, and one for later steps.
        connect_gpus: does the same for tensors on GPUs, each of which has one rank; None: what is
            on them travels by `connect`, too.
        activities: what the peers do while this rank waits for them.

    Attributes:
        group: all ranks of the generation, as this one sees them.
        limits: the timeouts.
        activities, device: as given.
        communicator: connects all ranks, for tensors in this machine's memory.
        sharing: ranks that compute on one GPU, which NCCL doesn't connect; () where none do.
        summaries: step summaries, over all ranks.
        gradients: connects all ranks, for collectives of gradients where they are.
        layers: connects layers that exchange within forward and backward, if there are any.
        buffers: connects all ranks' GPUs to broadcast buffers; None: `communicator` does.
        rows: for each model with row-sparse gradients, what connects all ranks to exchange them.
        intra_machine: connects the workers of this machine, if gradients are first summed inside
            each machine.
        replica_links: where several models or optimizers are exchanged, the connections of each.
        synchronizers: the present ones, by the index of the model and optimizer; closed with the
            context.

    Raises:
        CommError: a rank didn't come in time.
    """

    def __init__(
        self,
        group: Group,
        connect: Callable[[Group, str], Communicator],
        *,
        device: torch.device,
        limits: tuple[float, float],
        connect_gpus: Callable[[Group, str], Communicator] | None = None,
        activities: PeerActivities = NO_PEERS,
    ) -> None:
        self.group, self.limits = group, limits
        self.activities = activities
        self._connect = connect
        self.device = device
        self._communicators: list[Communicator] = []
        self._windows = count()
        self._opened: WeakSet[Window] = WeakSet()  # a synchronizer closes its own
        self._interrupting = threading.Lock()  # guards what opens and ends against `interrupt`
        self._interrupted = False
        self.synchronizers: dict[int, Synchronizer] = {}
        self.communicator = self._open(group, "steps")
        self.sharing = find_sharing_ranks(self.communicator, device)
        self._connect_gpus = connect if self.sharing or connect_gpus is None else connect_gpus
        # A thread sends those of GPUs, in an order that nothing else keeps.
        own = device.type == "cuda" and group.size > 1
        reporting = self._open(group, "summaries") if own else self.communicator
        self.summaries = StepSummaries(reporting, device, limits, activities)
        self.gradients = self.communicator
        self.layers: Communicator | None = None
        self.buffers: Communicator | None = None
        self.rows: list[Communicator] = []
        self.intra_machine: Communicator | None = None
        self.replica_links: list[Links] = []

    def end_startup(self) -> None:
        """Use the shorter timeouts of later steps from now on."""
        self.communicator.end_startup()
        self.gradients.end_startup()
        self.summaries.end_startup()

    def connect_gradients(self) -> None:
        """Connect all ranks' GPUs for collectives of gradients; collective, once.

        Raises:
            CommError: a rank didn't come in time.
        """
        self.gradients = self._open_gpus(self.group, "gradients")

    def connect_layers(self) -> None:
        """Connect layers that exchange within forward and backward; collective, once.

        Raises:
            CommError: a rank didn't come in time.
        """
        self.layers = self._open_gpus(self.group, "layers")

    def connect_buffers(self) -> None:
        """Connect all ranks' GPUs to broadcast the models' buffers; collective, once.

        Raises:
            CommError: a rank didn't come in time.
        """
        self.buffers = self._open_gpus(self.group, "buffers")

    def connect_rows(self) -> None:
        """Connect all ranks to exchange the row-sparse gradients of a further model; collective.

        Raises:
            CommError: a rank didn't come in time.
        """
        self.rows.append(self._open_gpus(self.group, f"rows/{len(self.rows)}"))

    def connect_machine(self) -> None:
        """Connect the workers of this machine; collective, once.

        Raises:
            CommError: a worker didn't come in time.
        """
        self.intra_machine = self._open_machine("machine")

    def connect_replica(self, *, gradients: bool, intra_machine: bool) -> None:
        """Connect the ranks for one of several exchanges; collective, once a replica.

        Args:
            gradients: there are collectives of gradients, which are on GPUs.
            intra_machine: gradients are first summed inside each machine.

        Raises:
            CommError: a rank didn't come in time.
        """
        purpose = f"replica/{len(self.replica_links)}"
        inside = self._open_machine(f"{purpose}/machine") if intra_machine else None
        own = self._open(self.group, purpose)
        of_gradients = self._open_gpus(self.group, f"{purpose}/gradients") if gradients else own
        self.replica_links.append(
            Links(communicator=own, gradients=of_gradients, intra_machine=inside)
        )

    def links(self, replica: int | None) -> Links:
        """Return the connections of one of several replicas, or those of the only replica."""
        if replica is not None:
            return self.replica_links[replica]
        return Links(
            communicator=self.communicator,
            gradients=self.gradients,
            intra_machine=self.intra_machine,
        )

    def _open_machine(self, purpose: str) -> Communicator:
        """Connect the workers of this machine.

        A first sum makes what later ones need on GPUs while nothing else runs there.
        """
        group, what = self.group.on_machine(), "the first sum of this machine's workers"
        communicator: Communicator = SingleRankCommunicator()
        if group.size > 1:
            communicator = self._open_gpus(group, f"{purpose}/{group.machine}")
        first = torch.ones(1, device=self.device)
        communicator.reduce(first).wait(what)
        communicator.broadcast(first).wait(what)
        assert first.tolist() == [group.size]
        return communicator

    @property
    def served_purpose(self) -> str:
        """The purpose of the window that a server is a rank of."""
        return f"{self._purpose}/served"

    @property
    def _purpose(self) -> str:
        return f"{self.group.generation.key_prefix}/window"

    @property
    def topology(self) -> Topology:
        """The ranks of each machine are a group."""
        return Topology.of(self.group.generation.workers_per_machine)

    def open_window(
        self,
        size: int,
        notifications: int,
        *,
        transport: str = "tcp",
        connections: int = 1,
        trace: Trace | None = None,
        leaders: bool = False,
        server: ServerLink | None = None,
    ) -> Window:
        """Open a window, over memory shared inside a machine unless by NIXL; collective.

        Args:
            size: bytes of the window's memory.
            notifications: number of its notifications.
            transport: "tcp" or "nixl".
            connections: number of TCP connections to each rank of another machine.
            trace: records the window's puts, if the run is traced.
            leaders: only the first worker of each machine has peers there: GPUs sum first.
            server: a server is a rank of the window, the last one; with "tcp".

        Raises:
            ConfigError: NIXL isn't installed.
            CommError: a rank didn't come in time, or can't be reached.
        """
        group, number = self.group, next(self._windows)
        exchanging = self.topology.leaders if leaders else self.topology
        alone = group.rank not in exchanging.ranks
        servers = () if server is None else (group.size,)
        bootstrap = Bootstrap(
            share=self._share if server is None else partial(self._share, publish=server.publish),
            rank=group.rank,
            world_size=group.size + len(servers),
            token=group.generation.token,
            purpose=f"{self._purpose}/{number}" if server is None else self.served_purpose,
            limit=self.limits[1 if number else 0],  # a later one opens in mid-run
            only=(group.rank,) if alone else (*exchanging.ranks, *servers),
        )
        where = (group.address if server is None else server.address, size, notifications)
        if transport == "nixl":  # which doesn't report when puts leave and arrive
            window: Window = nixl_window(bootstrap, *where)
        else:
            together = (ranks for ranks in exchanging.groups if group.rank in ranks)
            group_peers = next(together, (group.rank,))
            marks = 0 if trace is None else MARKS
            window = linked = connect_window(bootstrap, group_peers, *where, marks, connections)
            if trace is not None:
                trace.follow(number, lambda: linked.moments)
        window = window if trace is None else TracedWindow(window, number, trace)
        with self._interrupting:
            self._opened.add(window)
            if self._interrupted:  # meanwhile
                window.interrupt()
        return window

    def interrupt(self) -> None:
        """End all waits for peers with an error, now and later; may be called from another thread.

        Nothing is released: the thread that communicates gets the error, and then calls `abort`.
        """
        with self._interrupting:
            self._interrupted = True
            interrupts = [one.interrupt for one in self._communicators]
            interrupts += [one.interrupt for one in self._opened]
            for interrupt in interrupts:
                interrupt()

    def close(self) -> None:
        """End the connections after the last collectives have completed."""
        self._end(lambda communicator: communicator.close)

    def abort(self) -> None:
        """End the connections at once, without waiting for a peer: all waits for them end."""
        self._end(lambda communicator: communicator.abort)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _open(self, group: Group, purpose: str) -> Communicator:
        return self._opened_by(self._connect, group, purpose)

    def _open_gpus(self, group: Group, purpose: str) -> Communicator:
        return self._opened_by(self._connect_gpus, group, purpose)

    def _opened_by(
        self, connect: Callable[[Group, str], Communicator], group: Group, purpose: str
    ) -> Communicator:
        communicator = connect(group, purpose)
        with self._interrupting:
            self._communicators.append(communicator)
            if self._interrupted:  # meanwhile
                communicator.interrupt()
        return communicator

    def _end(self, how: Callable[[Communicator], Callable[[], None]]) -> None:
        """End everything, the newest first, each even if another fails."""
        with self._interrupting:
            ending, self._communicators = self._communicators, []
        with ExitStack() as ends:
            for communicator in ending:
                ends.callback(how(communicator))
            for synchronizer in self.synchronizers.values():
                ends.callback(synchronizer.close)
            self.synchronizers, self.replica_links = {}, []
            self.summaries.close()

    def _share(
        self, text: str, publish: Callable[[Sequence[str]], None] | None = None
    ) -> list[str]:
        """Gather a text from all ranks, by the communicator: the store may be gone by now."""
        what = "the addresses of windows"
        received = gather_bytes(self.communicator, text.encode(), what)
        texts = [data.decode() for data in received]
        if publish is not None and self.group.rank == 0:
            publish(texts)
        return texts
