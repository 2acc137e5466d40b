"""Generation context: the connections among the ranks of one generation, closed together.

Run                 for the whole run: the present context, the recorders
└─ context          for one generation
├─ communicators of all ranks, of SyncBatchNorm layers, of this machine's workers
├─ summaries     of steps
└─ synchronizer  the present one; it has buckets, windows and staging memory
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from typing import Self

import torch

from paceline.algorithms.synchronizer import Synchronizer
from paceline.cluster.membership.generation import Group
from paceline.comm.communicator import Communicator, gather_bytes
from paceline.comm.connection_window import connect_window
from paceline.comm.nixl.window import nixl_window
from paceline.comm.single_rank import SingleRankCommunicator
from paceline.comm.traced_window import TracedWindow
from paceline.comm.transport.bootstrap import Bootstrap
from paceline.comm.window import Window
from paceline.observe.trace.step_trace import MARKS, Trace
from paceline.reduce.put_engine.layout import Topology
from paceline.run.step_summary import StepSummaries


class GenerationContext:
    """Generation context: what lives as long as one generation of the world.

    As a context manager, it closes with the block, and aborts if the block fails.

    Args:
        group: all ranks of the generation.
        connect: connects the ranks of a group for a purpose; collective, once a purpose.
        device: device of the tensors in collectives.
        limits: timeouts in seconds: one for the start and the first step, and one for later steps.

    Attributes:
        group: all ranks of the generation, as this one sees them.
        limits: the timeouts.
        communicator: connects all ranks.
        summaries: step summaries, over all ranks.
        layers: connects layers that exchange within forward and backward, if there are any.
        intra_machine: connects the workers of this machine, if gradients are first summed inside
            each machine.
        synchronizer: the present one, if a model is exchanged; closed with the context.

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
    ) -> None:
        self.group, self.limits = group, limits
        self._connect, self._device = connect, device
        self._communicators: list[Communicator] = []
        self._windows = count()
        self.synchronizer: Synchronizer | None = None
        self.communicator = self._open(group, "steps")
        self.summaries = StepSummaries(self.communicator)
        self.layers: Communicator | None = None
        self.intra_machine: Communicator | None = None

    def connect_layers(self) -> None:
        """Connect layers that exchange within forward and backward; collective, once.

        Raises:
            CommError: a rank didn't come in time.
        """
        self.layers = self._open(self.group, "layers")

    def connect_machine(self) -> None:
        """Connect the workers of this machine; collective, once.

        A first sum makes what later ones need on GPUs while nothing else runs there.

        Raises:
            CommError: a worker didn't come in time.
        """
        group, what = self.group.on_machine(), "the first sum of this machine's workers"
        communicator: Communicator = SingleRankCommunicator()
        if group.size > 1:
            communicator = self._open(group, f"machine/{group.machine}")
        first = torch.ones(1, device=self._device)
        communicator.reduce(first).wait(what)
        communicator.broadcast(first).wait(what)
        assert first.tolist() == [group.size]
        self.intra_machine = communicator

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
    ) -> Window:
        """Open a window, over memory shared inside a machine unless by NIXL; collective.

        Where GPUs sum first, only the first worker of each machine has peers there.

        Args:
            size: bytes of the window's memory.
            notifications: number of its notifications.
            transport: "tcp" or "nixl".
            connections: number of TCP connections to each rank of another machine.
            trace: records the window's puts, if the run is traced.

        Raises:
            ConfigError: NIXL isn't installed.
            CommError: a rank didn't come in time, or can't be reached.
        """
        group, number = self.group, next(self._windows)
        exchanging = self.topology if self.intra_machine is None else self.topology.leaders
        alone = group.rank not in exchanging.ranks
        bootstrap = Bootstrap(
            share=self._share,
            rank=group.rank,
            world_size=group.size,
            token=group.generation.token,
            purpose=f"{group.generation.key_prefix}/window/{number}",
            limit=self.limits[1 if number else 0],  # a later one opens in mid-run
            only=(group.rank,) if alone else exchanging.ranks,
        )
        where = (group.address, size, notifications)
        if transport == "nixl":  # which doesn't report when puts leave and arrive
            window: Window = nixl_window(bootstrap, *where)
        else:
            together = (ranks for ranks in exchanging.groups if group.rank in ranks)
            group_peers = next(together, (group.rank,))
            marks = 0 if trace is None else MARKS
            window = linked = connect_window(bootstrap, group_peers, *where, marks, connections)
            if trace is not None:
                trace.follow(number, lambda: linked.moments)
        return window if trace is None else TracedWindow(window, number, trace)

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
        self._communicators.append(self._connect(group, purpose))
        return self._communicators[-1]

    def _end(self, how: Callable[[Communicator], Callable[[], None]]) -> None:
        """End everything, the newest first, each even if another fails."""
        with ExitStack() as ends:
            for communicator in self._communicators:
                ends.callback(how(communicator))
            if self.synchronizer is not None:
                ends.callback(self.synchronizer.close)
            self._communicators, self.synchronizer = [], None

    def _share(self, text: str) -> list[str]:
        """Gather a text from all ranks, by the communicator: the store may be gone by now."""
        what = "the addresses of windows"
        received = gather_bytes(self.communicator, text.encode(), self._device, what)
        return [data.decode() for data in received]
