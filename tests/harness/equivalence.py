"""Large-batch training twice: by plain torch in one process, and by Paceline on several ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.comm.communicator import Communicator, broadcast_all
from paceline.sync.allreduce import AllReduce
from paceline.sync.bucket import partition
from paceline.sync.replica import Replica
from paceline.sync.statistics import RunningStatistics
from paceline.sync.updater import Updater

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with Nesterov momentum, weight decay on matrices only: two parameter groups."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 1e-2}, {"params": vectors}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)


def convnet() -> nn.Module:
    """A small convolutional net without batch statistics, in float64."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 16, 10),
    ).double()


@dataclass(frozen=True)
class Training:
    """A model, an optimizer and global batches."""

    model: nn.Module
    make_optimizer: MakeOptimizer
    batches: Sequence[tuple[Tensor, Tensor]]
    gamma: float = 0.9  # of the learning rate, a step

    @staticmethod
    def of(model: nn.Module, make_optimizer: MakeOptimizer = sgd, steps: int = 10) -> Training:
        """Make up batches of 12 images, the last one of 5."""
        random = torch.Generator().manual_seed(7)
        sizes = [12] * (steps - 1) + [5]
        batches = [
            (
                torch.randn(n, 3, 8, 8, dtype=torch.float64, generator=random),
                torch.randint(0, 10, (n,), generator=random),
            )
            for n in sizes
        ]
        return Training(model, make_optimizer, batches)

    def alone(self) -> dict[str, Tensor]:
        """Train by plain torch; return the state dict."""
        model = copy.deepcopy(self.model)
        optimizer = self.make_optimizer(model)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, self.gamma)
        for x, y in self.batches:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return model.state_dict()

    def on_rank(
        self, communicator: Communicator, bucket_bytes: int, kind: Callable[..., Any] = AllReduce
    ) -> dict[str, Tensor]:
        """Train this rank's slices by Paceline; return the state dict."""
        model = copy.deepcopy(self.model)
        if communicator.rank > 0:
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(communicator.rank)  # must not matter: rank 0's are broadcast
        optimizer = self.make_optimizer(model)
        replica = replicate(model, optimizer, communicator, bucket_bytes, kind)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, self.gamma)
        for number, (x, y) in enumerate(self.batches):
            share = _share(len(x), communicator)
            with replica.step(number, (share.stop - share.start) / len(x)):
                local = share if share.stop > share.start else slice(0, 1)
                F.cross_entropy(model(x[local]), y[local]).backward()
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        replica.close()
        return state

    def with_model(self, model: nn.Module) -> Training:
        """Return the same training of another model."""
        return replace(self, model=model)


def replicate(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    communicator: Communicator,
    bucket_bytes: int,
    kind: Callable[..., Any] = AllReduce,
) -> Replica:
    """Broadcast rank 0's model and bind it to a synchronizer of a kind."""
    broadcast_all(communicator, [*model.parameters(), *model.buffers()], "start")
    groups = {p: i for i, g in enumerate(optimizer.param_groups) for p in g["params"]}
    buckets = partition(model.parameters(), groups, bucket_bytes)
    updater = Updater(optimizer, buckets)
    synchronizer = kind(buckets, communicator, updater, RunningStatistics(model))
    return Replica(model, optimizer, synchronizer)


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest absolute difference of two state dicts with the same names."""
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def _share(samples: int, communicator: Communicator) -> slice:
    """Cut `samples` into slices in rank order; written again here, as an independent reference."""
    each, rest = divmod(samples, communicator.world_size)
    rank = communicator.rank
    first = rank * each + min(rank, rest)
    return slice(first, first + each + (rank < rest))
