"""Generation context: the connections among the ranks of one generation, closed together.

Run                 for the whole run: the present context, the recorders
└─ context          for one generation
   ├─ mesh          the ranks, by axes
   ├─ groups        communicators, by axis and purpose
   ├─ summaries     of steps
   └─ kept          the present synchronizers; each has buckets, windows and staging memory
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol, Self
from weakref import WeakKeyDictionary

import torch

from paceline.cluster.membership.generation import Generation, Group
from paceline.cluster.membership.protocol import Interruptible
from paceline.comm.communicator import Communicator
from paceline.comm.connection_window import connect_window
from paceline.comm.nixl.window import nixl_window
from paceline.comm.peer_activities import NO_PEERS, PeerActivities
from paceline.comm.shared_gpus import find_sharing_ranks
from paceline.comm.transport.bootstrap import Bootstrap
from paceline.comm.window import Window
from paceline.generation.gathered_addresses import GatheredAddresses, Servers
from paceline.generation.mesh import Mesh
from paceline.generation.summaries import StepSummaries
from paceline.timeline.timeline import Timeline
from paceline.timeline.trace import MARKS
from paceline.timeline.traced_window import TracedWindow

# Purposes of groups whose tensors are where the ranks compute; those of all others are in this
# machine's memory. A number behind a purpose tells those of several models apart: "rows/2".
_ON_DEVICES = ("gradients", "layers", "buffers", "rows")
# Of these, what the training thread starts in one order with "steps": it has a communicator of its
# own only where NCCL connects the ranks.
_WITH_STEPS = ("gradients", "buffers")
_OF_REPLICA = ("stage", "tensor")  # axes that divide a replica


class Closable(Protocol):
    """Protocol of what is closed with its context."""

    def close(self) -> None:
        """Release everything, without a wait; may be called again."""


@dataclass(frozen=True, kw_only=True)
class WindowSpec:
    """Specification of a window: its ranks, and how they are reached.

    Attributes:
        axis: of the mesh, along which the window's ranks are; they are counted along it.
        transport: "tcp" or "nixl".
        connections: number of TCP connections to each rank of another machine.
        leaders: only the first worker of each machine has peers there: GPUs sum first.
        worker: the only rank that exchanges, with servers; the others only take part in opening the
            window. None: all exchange.
        servers: are ranks of the window, behind all others; with "tcp".
    """

    axis: str = "data"
    transport: str = "tcp"
    connections: int = 1
    leaders: bool = False
    worker: int | None = None
    servers: Servers | None = None


class GenerationContext:
    """Generation context: what lives as long as one generation of the world.

    It has no connections before `open`. As a context manager, it closes with the block, and aborts
    if the block fails.

    Args:
        world: all ranks of the generation, as this one sees them.
        device: the device on which this rank computes.
        limits: timeouts in seconds: one for the start and the first step, and one for later steps.
        activities: what the peers do while this rank waits for them.
        mesh: the ranks, by axes; None: each rank has a replica of the whole model.
        timeline: this rank's; None: one for this context alone.

    Attributes:
        world: all ranks of the generation, as this one sees them.
        mesh: the ranks, by axes.
        limits: the timeouts.
        timeline: measures this rank's waits, and follows the windows of a traced run.
        stage: the number of this rank's stage, from 0.
        sharing: ranks that compute on one GPU, which NCCL doesn't connect; () where none do.
        started: whether the first step has passed, and the shorter timeouts hold.
        summaries: step summaries, over all ranks; once it is open.
    """

    summaries: StepSummaries

    def __init__(
        self,
        world: Group,
        *,
        device: torch.device,
        limits: tuple[float, float],
        activities: PeerActivities = NO_PEERS,
        mesh: Mesh | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self.world = world
        self.limits = limits
        self.mesh = mesh or Mesh.of_data(world.generation)
        self.activities = activities
        self.timeline = timeline or Timeline()
        self.device = device
        self.sharing: Sequence[int] = ()
        self.started = False
        self._along: dict[str, Group] = {}
        self._groups: dict[tuple[tuple[int, ...], str], Communicator] = {}
        self._communicators: list[Communicator] = []
        self._windows = Counter[str]()  # that have been opened, by purpose
        self._interrupting = threading.Lock()  # guards what opens and ends against `interrupt`
        self._interrupted = False
        self._broken = False  # this rank's own replica has lost a rank
        self._spares = False
        # Communicators, windows, and what waits for peers besides, by whether the peers are of this
        # replica alone; their users close and drop them.
        self._waits: WeakKeyDictionary[Interruptible, bool] = WeakKeyDictionary()
        self._kept: dict[str, Closable] = {}
        self.stage = self.along("stage").rank if "stage" in self.mesh.lengths else 0

    def open(
        self,
        connect: Callable[[Group, str], Communicator],
        connect_gpus: Callable[[Group, str], Communicator] | None = None,
    ) -> Self:
        """Connect the ranks, and return the context; collective.

        Args:
            connect: connects the ranks of a group for a purpose, for tensors in this machine's
                memory; collective, once a purpose.
            connect_gpus: does the same for tensors on GPUs, each of which has one rank; None: what
                is on them travels by `connect`, too.
        """
        self._connect = connect
        self._connect_gpus = connect
        self.sharing = find_sharing_ranks(self.group("all", "steps"), self.device)
        if not self.sharing and connect_gpus is not None:
            self._connect_gpus = connect_gpus
        # A thread sends those of GPUs, in an order that nothing else keeps.
        own = self.device.type == "cuda" and self.world.size > 1
        reporting = self.group("all", "summaries" if own else "steps")
        self.summaries = StepSummaries(
            reporting,
            self.device,
            self.limits,
            self.activities,
            self.timeline,
            replicas=self.mesh.lines("data"),
        )
        return self

    def allow_lead(self, steps: int) -> None:
        """Let ranks lead each other by so many steps; collective."""
        self.summaries.allow_lead(steps, self.group("all", "summaries"))

    def begin(self, generation: Generation) -> None:
        """Place the same ranks in the run: their generation has its number now."""
        self.world = replace(self.world, generation=generation)
        self._along.clear()

    @property
    def counts(self) -> bool:
        """Whether this rank's samples and sums count: it is the first one of its replica."""
        return self.along("data").ranks[0] == 0

    @property
    def writes(self) -> bool:
        """Whether this rank writes its part of a checkpoint: it is the first one that has it."""
        return self.along("data").rank == 0

    def along(self, axis: str) -> Group:
        """Return the ranks along an axis, at this rank's place on the others.

        Args:
            axis: of the mesh: "data", "stage", "tensor", "all" or "machine".
        """
        if axis not in self._along:
            own = self.world.rank
            ranks = self.mesh.line(axis, own)
            self._along[axis] = replace(self.world, ranks=ranks, rank=ranks.index(own))
        return self._along[axis]

    def group(self, axis: str, purpose: str) -> Communicator:
        """Return what connects the ranks along an axis for a purpose; opened once, collectively.

        Along two axes that have the same ranks, it is the same.

        Args:
            axis: as of `along`.
            purpose: "steps", for what the host knows; "gradients", for collectives of gradients
                where they are; "layers", for those that exchange within forward and backward;
                "buffers", to broadcast them; "rows", for row-sparse gradients; "summaries". Those
                of one of several models end in its number: "steps/2".
        """
        kind, slash, number = purpose.partition("/")
        by_nccl = self.device.type == "cuda" and not self.sharing
        if kind in _WITH_STEPS and not by_nccl:
            kind = "steps"
        group = self.along(axis)
        purpose = f"{kind}{slash}{number}"
        key = (group.ranks, purpose)
        if key not in self._groups:
            connect = self._connect_gpus if kind in _ON_DEVICES else self._connect
            everyone = group.size == self.world.size
            name = purpose if everyone else f"{axis}/{group.ranks[0]}/{purpose}"
            opened = connect(group, name)
            self._groups[key] = opened
            self._communicators.append(opened)
            self.let_interrupt(opened, axis)
            if axis == "machine":
                self._begin_sums(opened)
        return self._groups[key]

    def _begin_sums(self, communicator: Communicator) -> None:
        """Make what later sums of a machine's GPUs need, while nothing else runs on these."""
        what = "the first sum of this machine's workers"
        first = torch.ones(1, device=self.device)
        communicator.reduce(first).wait(what)
        communicator.broadcast(first).wait(what)
        assert first.tolist() == [communicator.world_size]

    def end_startup(self, *purposes: str) -> None:
        """Use the shorter timeouts of later steps from now on: of steps, and for some purposes."""
        for purpose in ("steps", *purposes):
            self.group("data", purpose).end_startup()
        self.summaries.end_startup()
        self.started = True

    def keep(self, purpose: str, resource: Closable) -> None:
        """Close something with the context.

        Args:
            purpose: what it is for; a later resource for the same purpose takes its place.
            resource: what is kept.
        """
        self._kept[purpose] = resource

    def let_interrupt(self, waits: Interruptible, axis: str = "all") -> None:
        """Let `interrupt` end further waits of this generation, at once where it was called.

        Args:
            axis: along which the peers are.
        """
        with self._interrupting:
            self._waits[waits] = axis in _OF_REPLICA and self.mesh.lengths["data"] > 1
            self._end_waits()

    @property
    def spares(self) -> bool:
        """Whether waits inside this rank's replica outlast the loss of another one."""
        return self._spares

    @spares.setter
    def spares(self, on: bool) -> None:
        with self._interrupting:
            self._spares = on
            self._end_waits()

    def next_window(self, purpose: str, axis: str = "data") -> str:
        """Return the name of the next window for a purpose, unlike that of any other window."""
        line = self.along(axis)
        where = "" if line.size == self.world.size else f"{axis}/{line.ranks[0]}/"
        number = self._windows[f"{axis}/{purpose}"]
        return f"{self.world.generation.key_prefix}/window/{where}{purpose}/{number}"

    def window(self, purpose: str, spec: WindowSpec, size: int, notifications: int) -> Window:
        """Open a window, over memory shared inside a machine unless by NIXL; collective.

        Args:
            purpose: what it is for, such as "gradients"; any number of windows may be for one. The
                ranks along the axis open them in one order.
            spec: its ranks, and how they are reached.
            size: bytes of the window's memory.

        Raises:
            ConfigError: NIXL isn't installed.
            CommError: a rank didn't come in time, or can't be reached.
        """
        group = self.along(spec.axis)
        name = self.next_window(purpose, spec.axis)
        number = self._windows.total()
        self._windows[f"{spec.axis}/{purpose}"] += 1
        machines = self.mesh.machines_along(spec.axis, self.world.rank)
        exchanging = [ranks[:1] for ranks in machines] if spec.leaders else machines
        if spec.worker is not None:
            exchanging = [(spec.worker,)]
        sharing = next((ranks for ranks in exchanging if group.rank in ranks), None)
        link = spec.servers
        servers = range(group.size, group.size + (0 if link is None else link.count))
        bootstrap = Bootstrap(
            addresses=GatheredAddresses(self.group(spec.axis, "steps"), link),
            rank=group.rank,
            world_size=servers.stop,
            token=group.generation.token,
            purpose=name,
            limit=self.limits[1 if number else 0],  # a later one opens in mid-run
            only=(group.rank,) if sharing is None else (*chain(*exchanging), *servers),
        )
        where = (group.address if link is None else link.address, size, notifications)
        traced = self.timeline.traced
        if spec.transport == "nixl":  # which doesn't report when puts leave and arrive
            window: Window = nixl_window(bootstrap, *where)
        else:
            group_peers = (group.rank,) if sharing is None else sharing
            how = (MARKS if traced else 0, spec.connections)
            window = linked = connect_window(bootstrap, group_peers, *where, *how)
            if traced:
                self.timeline.follow(number, linked)
        window = TracedWindow(window, number, self.timeline) if traced else window
        self.let_interrupt(window, spec.axis)
        return window

    def interrupt(self, *, broken: bool = False) -> None:
        """End waits for peers with an error, now and later; may be called from another thread.

        Those inside this rank's replica last as long as the context spares them. Nothing is
        released: the thread that communicates gets the error, and then calls `abort`.

        Args:
            broken: this rank's own replica has lost a rank.
        """
        with self._interrupting:
            self._interrupted = True
            self._broken |= broken
            self._end_waits()

    def _end_waits(self) -> None:
        """End the waits that are to end, each once."""
        spares = self._spares and not self._broken
        for waits, of_replica in [*self._waits.items()] if self._interrupted else ():
            if not (spares and of_replica):
                del self._waits[waits]
                waits.interrupt()

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

    def _end(self, how: Callable[[Communicator], Callable[[], None]]) -> None:
        """End everything, the newest first, each even if another fails."""
        with self._interrupting:
            ending = self._communicators
            self._communicators = []
            self._waits.clear()
        with ExitStack() as ends:
            for communicator in ending:
                ends.callback(how(communicator))
            for resource in self._kept.values():
                ends.callback(resource.close)
            self._kept = {}
            self.summaries.close()
