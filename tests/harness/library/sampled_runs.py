"""Runs whose samples a sampler draws, on several ranks: undisturbed, and killed and resumed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler, WeightedRandomSampler

import paceline
from paceline.comm.communicator import Communicator
from tests.harness.library.small_training import (
    BATCH,
    SEED,
    copied,
    loss_of,
    network,
    place,
    samples,
    sgd,
)

SIZE, EPOCHS = 50, 3
WEIGHTS = torch.arange(float(SIZE))


class Killed(Exception):
    """The process came to its end here."""


class Numbered(Dataset[Any]):
    """Samples with their number, and with random noise."""

    def __init__(self) -> None:
        self._samples = samples(SIZE)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        x, y = self._samples[index]
        return x + 0.1 * torch.randn(6, dtype=torch.float64), y, index


class Curriculum(Sampler[int]):
    """A sampler with state of its own, which no process can draw again; on rank 0 alone.

    Args:
        rank: of the process; another rank's order would be wrong.
    """

    counter = itertools.count()

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        assert self.rank == 0, "rank 0 draws"
        first = next(self.counter)
        return iter([(first + 7 * number) % SIZE for number in range(40)])


def drawn_by(kind: str, rank: int) -> dict[str, Any]:
    """Return the arguments of a loader."""
    if kind == "weights":
        return {"weights": WEIGHTS}
    if kind == "curriculum":
        return {"sampler": Curriculum(rank)}
    generator = torch.Generator().manual_seed(4)
    return {"sampler": WeightedRandomSampler(WEIGHTS, 44, generator=generator)}


def train(
    kind: str, run: Path | None = None, *, die_before: int | None = None
) -> tuple[list[list[int]], dict[str, Tensor]]:
    """Train; return this rank's samples of each step, and the model's state."""
    seen = []
    with paceline.join(run, seed=SEED, checkpoint_steps=1) as world:
        model = network()
        optimizer = sgd(model)
        paceline.parallelize(model, optimizer, world, sync="allreduce")
        loader = paceline.loader(Numbered(), BATCH, world, **drawn_by(kind, world.rank))
        for _ in range(loader.epoch, EPOCHS):
            for x, y, numbers in loader:
                if world.steps == die_before:
                    raise Killed
                with world.step():
                    loss_of(model, x, y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                seen.append(numbers.tolist() if loader.count else [])
        return seen, copied(model)


KINDS = ("weights", "generator", "curriculum")


def run_sampled(communicator: Communicator, ports: list[int], folder: str) -> dict[str, Any]:
    """Train each kind undisturbed, and killed before a step and resumed; a world each."""
    results: dict[str, Any] = {}
    port = iter(ports)
    for kind in KINDS:
        place(communicator, next(port))
        Curriculum.counter = itertools.count()
        whole = train(kind)
        place(communicator, next(port))
        Curriculum.counter = itertools.count()
        run = Path(folder) / f"{kind}-{communicator.world_size}"
        # The curriculum can't be drawn again: it is killed in the last epoch. The others draw more.
        steps = len(whole[0])
        killed_at = steps - 1 if kind == "curriculum" else steps // EPOCHS + 3
        with suppress(Killed):
            train(kind, run, die_before=killed_at)
        Curriculum.counter = itertools.count(1_000)
        place(communicator, next(port))
        results[kind] = (*whole, *train(kind, run))
    return results
