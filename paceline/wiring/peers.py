"""A worker's connections with the others: communicators, windows, and their device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from paceline.cluster.membership.generation import Group
from paceline.comm.communicator import Communicator, gather_bytes
from paceline.comm.connection_window import connect_window
from paceline.comm.nixl.window import nixl_window
from paceline.comm.process_group import ProcessGroupCommunicator
from paceline.comm.single_rank import SingleRankCommunicator
from paceline.comm.traced_window import TracedWindow
from paceline.comm.transport.bootstrap import Bootstrap
from paceline.comm.window import Window
from paceline.config.train import TrainConfig
from paceline.observe.trace.step_trace import MARKS, Trace
from paceline.recorder import NullRecorder, Recorder
from paceline.reduce.put_engine.layout import Topology


@dataclass(frozen=True, kw_only=True)
class Peers:
    """Communication context of a worker: group, timeouts, communicators.

    Attributes:
        group: all ranks of this generation.
        limits: timeouts in seconds: one for the start and the first step, and one for later steps.
        communicator: connects all ranks.
        device: device of the communicator's tensors.
        recorder: receives spans and counts of the exchange.
        trace: recorder of the trace; None if the run is not traced.
        intra_machine: connects the workers of this machine, if gradients are first summed inside
            each machine; else None.
    """

    group: Group
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
        """Open a window, over memory shared inside a machine unless by NIXL; collective.

        Where GPUs sum first, only the first worker of each machine has peers there.

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
            group_peers = (group.rank,) if alone else exchanging.groups[group.machine]
            marks = MARKS if self.trace else 0
            window = linked = connect_window(bootstrap, group_peers, *where, marks, connections)
            if self.trace is not None:
                self.trace.follow(number, lambda: linked.moments)
        return window if self.trace is None else TracedWindow(window, number, self.trace)

    def _share(self, text: str) -> list[str]:
        """Gather a text from all ranks, by the communicator: the store may be gone by now."""
        what = "the addresses of windows"
        received = gather_bytes(self.communicator, text.encode(), self.device, what)
        return [data.decode() for data in received]

    @property
    def topology(self) -> Topology:
        """The ranks of each machine are a group."""
        return Topology.of(self.group.generation.workers_per_machine)


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
    config: TrainConfig,
    group: Group,
    store: Store,
    device: torch.device,
    purpose: str = "steps",
) -> Communicator:
    """Connect this worker with all others of its generation; collective, once a purpose.

    Raises:
        CommError: a rank didn't come in time.
    """
    return ProcessGroupCommunicator(
        PrefixStore(f"{group.generation.key_prefix}/{purpose}", store),
        rank=group.rank,
        world_size=group.size,
        device=device,
        address=group.address,
        first_timeout=config.world.first_iter_timeout,
        timeout=config.world.timeout,
    )


def connect_layers(
    config: TrainConfig, group: Group, store: Store, device: torch.device
) -> Communicator | None:
    """Connect layers that exchange within forward and backward, if there are any; collective.

    Raises:
        CommError: a rank didn't come in time.
    """
    return connect(config, group, store, device, "layers") if config.model.sync_bn else None


def adds_up_on_gpus(group: Group, device: torch.device, sync: str) -> bool:
    """Tell whether a machine's GPUs sum before one of its workers exchanges; equal on all ranks.

    On one machine alone, `--sync allreduce` is such a sum, and windows share memory.
    """
    workers = group.generation.workers_per_machine
    several = len(workers) > 1 and max(workers) > 1
    return sync == "notified" and device.type == "cuda" and several


def connect_machine(
    group: Group, store: Store, device: torch.device, limits: tuple[float, float], sync: str
) -> Communicator | None:
    """Connect the workers of this machine, if their GPUs sum first; as `connect_group`."""
    sums = adds_up_on_gpus(group, device, sync)
    return connect_group(group, store, device, limits) if sums else None


def connect_group(
    group: Group, store: Store, device: torch.device, limits: tuple[float, float]
) -> Communicator:
    """Connect the workers of this machine; collective.

    A first sum makes what later ones need on GPUs while nothing else runs there.

    Args:
        group: all ranks of this generation.
        store: where workers find each other; fresh in this generation.
        device: this worker's.
        limits: seconds to wait for the others, at the start and later.

    Raises:
        CommError: a worker didn't come in time.
    """
    if group.local_world_size == 1:
        return SingleRankCommunicator()
    intra_machine = ProcessGroupCommunicator(
        PrefixStore(f"{group.generation.key_prefix}/machine/{group.machine}", store),
        rank=group.local_rank,
        world_size=group.local_world_size,
        device=device,
        address=group.address,
        first_timeout=limits[0],
        timeout=limits[1],
    )
    first, what = torch.ones(1, device=device), "the first sum of this machine's workers"
    intra_machine.reduce(first).wait(what)
    intra_machine.broadcast(first).wait(what)
    assert first.tolist() == [group.local_world_size]
    return intra_machine
