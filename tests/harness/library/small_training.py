"""A small training by the library, and the same by plain torch on whole batches.

Float64, so that both agree to ten digits; the order of the samples is `Order`'s.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline.comm.communicator import Communicator
from paceline.data.order import Order

BATCH = 12
SEED = 5
Batches = Iterator[tuple[Tensor, Tensor]]


def samples(count: int = 50) -> TensorDataset:
    """Make up `count` samples of 6 values with labels 0 to 2; the last batch has 2 of 50."""
    random = torch.Generator().manual_seed(1)
    x = torch.randn(count, 6, dtype=torch.float64, generator=random)
    return TensorDataset(x, torch.randint(0, 3, (count,), generator=random))


class Words(nn.Module):
    """A table with row-sparse gradients, of which each value of a sample chooses a row."""

    ROWS = 64

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(self.ROWS, 16, mode="sum", sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.table((10 * x).long() % self.ROWS)
        return rows


def network(*, norm: bool = False, dropout: float = 0.0, words: bool = False) -> nn.Sequential:
    """Make a net of two layers in float64, the same at each call."""
    torch.manual_seed(3)
    return nn.Sequential(
        Words() if words else nn.Linear(6, 16),
        nn.BatchNorm1d(16) if norm else nn.Identity(),
        nn.Tanh(),
        nn.Dropout(dropout),
        nn.Linear(16, 3),
    ).to(torch.float64)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, whose state depends on the scale of the gradients."""
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean cross entropy of a batch."""
    return F.cross_entropy(model(x), y)


def whole_batches(dataset: TensorDataset, epoch: int) -> Batches:
    """Yield an epoch's global batches."""
    order = Order(size=len(dataset), batch_size=BATCH, seed=SEED)
    for indices in torch.from_numpy(order.epoch_indices(epoch)).split(BATCH):
        x, y = dataset[indices]
        yield x, y


def trained_alone(
    model: nn.Module, optimizer: torch.optim.Optimizer, epochs: int, *, clip: float = math.inf
) -> dict[str, Tensor]:
    """Train by plain torch on whole batches, gradients clipped by their norm; return the state."""
    for epoch in range(epochs):
        for x, y in whole_batches(samples(), epoch):
            loss_of(model, x, y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return copied(model)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kind of training loop.

    Attributes:
        make_optimizer: makes one of the model's parameters.
        make_schedule: makes a scheduler, if there is one.
        schedule_in: what ends with a step of the scheduler, "step" or "epoch".
        norm: the model has a BatchNorm, and `sync_bn` is on.
        train_step: what a step computes; of (model, x, y, optimizer, world); world is None in plain
            torch.
        samples: how many there are.
        epochs: how many.
    """

    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    make_schedule: Callable[[torch.optim.Optimizer], Any] | None = None
    schedule_in: str = "epoch"
    norm: bool = False
    train_step: Callable[..., None] = field(default_factory=lambda: plain_step)
    samples: int = 50
    epochs: int = 3

    def alone(self) -> dict[str, Tensor]:
        """Train by plain torch; return the model's state."""
        model = network(norm=self.norm)
        optimizer = self.make_optimizer(model)
        schedule = self.make_schedule(optimizer) if self.make_schedule else None
        for epoch in range(self.epochs):
            for x, y in whole_batches(samples(self.samples), epoch):
                self.train_step(model, x, y, optimizer, None)
                if schedule and self.schedule_in == "step":
                    schedule.step()
            if schedule and self.schedule_in == "epoch":
                schedule.step()
        return model.state_dict()

    def by_library(self, run: Path | None = None) -> dict[str, Tensor]:
        """Train by the library, as this process's rank; return the model's state."""
        with paceline.join(run, seed=SEED) as world:
            model = network(norm=self.norm)
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(world.rank)  # must not matter: rank 0's are broadcast
            optimizer = self.make_optimizer(model)
            model, optimizer = paceline.parallelize(
                model, optimizer, world, bucket_mb=1e-3, sync_bn=self.norm
            )
            schedule = self.make_schedule(optimizer) if self.make_schedule else None
            loader = paceline.loader(samples(self.samples), BATCH, world)
            for _ in range(loader.epoch, self.epochs):
                for x, y in loader:
                    with world.step():
                        self.train_step(model, x, y, optimizer, world)
                    if schedule and self.schedule_in == "step":
                        schedule.step()
                if schedule and self.schedule_in == "epoch":
                    schedule.step()
            return copied(model)


def plain_step(
    model: nn.Module, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer, world: Any
) -> None:
    """The usual step."""
    loss_of(model, x, y).backward()
    optimizer.step()
    optimizer.zero_grad()


def copied(model: nn.Module) -> dict[str, Tensor]:
    """Copy a model's state."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def place(communicator: Communicator, port: int) -> None:
    """Tell this process, a rank of `spawn`, its place, as torchrun's variables do."""
    os.environ.update(
        RANK=str(communicator.rank),
        WORLD_SIZE=str(communicator.world_size),
        LOCAL_RANK=str(communicator.rank),
        LOCAL_WORLD_SIZE=str(communicator.world_size),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
