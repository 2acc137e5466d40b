"""A rank of a benchmark: its place among the others, how it meets them, and what it can run."""

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
class Place:
    """What a rank is told: where it is, and where it meets the others.

    `store` is a file that all ranks see, `address` the one that reaches this rank, `company` says
    how many ranks there are at each address; `rows` are the names of what it is to run.
    """

    rank: int
    ranks: int
    address: str
    company: dict[str, int]
    store: str
    rows: list[str]

    @property
    def machine(self) -> int:
        """The number of this rank's machine."""
        return list(self.company).index(self.address)

    @property
    def local_rank(self) -> int:
        """This rank's number on its machine."""
        return self.rank - sum(list(self.company.values())[: self.machine])


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


def meet(place: Place, name: str) -> Store:
    """Return where all ranks find each other for the purpose `name`."""
    store = PrefixStore(name, FileStore(place.store, -1))
    store.set_timeout(timedelta(seconds=LIMIT))
    return store


def run_of(place: Place, store: Store) -> Run:
    """Connect with the other ranks as `paceline train` does; collective."""
    addresses = tuple(place.company)
    generation = Generation.of_workers(
        tuple(place.company.values()),
        start_id="benchmark",
        token="benchmark",
        addresses=addresses,
        hosts=addresses,
    )
    device, limits = torch.device("cpu"), (LIMIT, LIMIT)
    connecting = partial(connect, store=store, device=device, limits=limits)
    group = Group.world(generation, place.rank)
    return Run(context=GenerationContext(group, device=device, limits=limits).open(connecting))


def join_gloo(place: Place, store: Store) -> None:
    """Make torch's default process group, once a process; collective."""
    if not dist.is_initialized():
        dist.init_process_group(
            "gloo",
            store=store,
            rank=place.rank,
            world_size=place.ranks,
            timeout=timedelta(seconds=LIMIT),
        )


def nothing() -> None:
    """Leave everything as it is: nothing is left to install."""
