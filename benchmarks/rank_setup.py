"""A rank of a benchmark: its setup, its connections to the others, and what it can run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from stream import LIMIT
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, Store

from paceline.cluster.membership.generation import Generation, Group
from paceline.generation.connector import connect
from paceline.generation.context import GenerationContext
from paceline.generation.run import Run


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """Setup of a rank, which its parent passes to it.

    Attributes:
        rank: its rank.
        ranks: the world size.
        address: the address at which the others reach it.
        ranks_by_address: the number of ranks at each address.
        store: the path of a file that all ranks see, for their rendezvous.
        rows: the names of what it is to run.
    """

    rank: int
    ranks: int
    address: str
    ranks_by_address: dict[str, int]
    store: str
    rows: list[str]

    @property
    def machine(self) -> int:
        """The index of this rank's machine."""
        return list(self.ranks_by_address).index(self.address)

    @property
    def local_rank(self) -> int:
        """This rank's index on its machine."""
        return self.rank - sum(list(self.ranks_by_address.values())[: self.machine])


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to run a step.

    Attributes:
        step: runs one.
        finish: installs what the last one left under way.
        result: what it has made: weights, or a sum.
    """

    step: Callable[[], None]
    finish: Callable[[], None]
    result: Callable[[], Sequence[Tensor]]


def open_store(setup: RankSetup, name: str) -> Store:
    """Open the ranks' common store, for the purpose `name`."""
    store = PrefixStore(name, FileStore(setup.store, -1))
    store.set_timeout(timedelta(seconds=LIMIT))
    return store


def run_of(setup: RankSetup, store: Store) -> Run:
    """Connect with the other ranks as `paceline train` does; collective."""
    addresses = tuple(setup.ranks_by_address)
    generation = Generation.of_workers(
        tuple(setup.ranks_by_address.values()),
        start_id="benchmark",
        token="benchmark",
        addresses=addresses,
        hosts=addresses,
    )
    device, limits = torch.device("cpu"), (LIMIT, LIMIT)
    connecting = partial(connect, store=store, device=device, limits=limits)
    group = Group.world(generation, setup.rank)
    return Run(context=GenerationContext(group, device=device, limits=limits).open(connecting))


def join_gloo(setup: RankSetup, store: Store) -> None:
    """Make torch's default process group, once a process; collective."""
    if not dist.is_initialized():
        dist.init_process_group(
            "gloo",
            store=store,
            rank=setup.rank,
            world_size=setup.ranks,
            timeout=timedelta(seconds=LIMIT),
        )


def nothing() -> None:
    """Leave everything as it is: nothing is left to install."""
