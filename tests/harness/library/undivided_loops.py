"""Loops whose batches aren't divided, or whose losses aren't weighed, and others that are right.

    paceline launch -n 2 -- python -m tests.harness.library.undivided_loops

Each trains in a world of its own; rank 0 says which one begins.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

import paceline

LABELS = torch.randint(0, 3, (96,), generator=torch.Generator().manual_seed(1))
LABELS[:40] = -100
INPUTS = torch.randn(96, 4, generator=torch.Generator().manual_seed(2))
DATA = TensorDataset(INPUTS, LABELS.abs() % 3)
IGNORING = TensorDataset(INPUTS, LABELS)


class Lines(IterableDataset[Any]):
    """A stream that each rank reads from its beginning, every `step`-th sample."""

    def __init__(self, first: int, step: int) -> None:
        self.numbers = range(first, 96, step)

    def __iter__(self) -> Iterator[Any]:
        return (DATA[number] for number in self.numbers)


def shuffled(world: paceline.World) -> Iterable[Any]:
    """A loader of one's own, with torch seeded alike."""
    return DataLoader(DATA, batch_size=8, shuffle=True)


def weighted(world: paceline.World) -> Iterable[Any]:
    """A sampler of one's own, likewise."""
    return DataLoader(DATA, batch_size=8, sampler=WeightedRandomSampler(torch.ones(96), 96))


def stream(world: paceline.World) -> Iterable[Any]:
    """A stream that no rank divides."""
    return paceline.loader(Lines(0, 1), 16, world)


def divided_stream(world: paceline.World) -> Iterable[Any]:
    """A stream that each rank divides."""
    return paceline.loader(Lines(world.rank, world.world_size), 16, world)


def distributed(world: paceline.World) -> Iterable[Any]:
    """A loader of one's own with a sampler for each rank."""
    sampler = DistributedSampler(DATA, world.world_size, world.rank)
    return DataLoader(DATA, batch_size=8, sampler=sampler)


def ignoring(world: paceline.World) -> Iterable[Any]:
    """Labels of which some are ignored."""
    return paceline.loader(IGNORING, 16, world)


def parts(world: paceline.World) -> Iterable[Any]:
    """A part of the data set, which the loader divides again."""
    numbers = range(world.rank, 96, world.world_size)
    return paceline.loader(Subset(DATA, numbers), 16, world)


WRONG = (shuffled, weighted, stream, ignoring, parts)
RIGHT = (divided_stream, distributed)


def main() -> None:
    for make in (*WRONG, *RIGHT):
        torch.manual_seed(0)
        with paceline.join() as world:
            if world.rank == 0:
                print(f"begins {make.__name__}", file=sys.stderr, flush=True)
            model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            paceline.parallelize(model, optimizer, world, sync="allreduce")
            for x, y in make(world):
                with world.step():
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()


if __name__ == "__main__":
    main()
