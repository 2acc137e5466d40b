"""A model, its optimizer and its replica on one rank, for tests of what happens when."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from paceline.algorithms.allreduce import make_allreduce
from paceline.comm.communicator import Communicator
from paceline.replica.replica import Replica
from tests.harness.equivalence.large_batch import Training, replicate
from tests.harness.equivalence.steps_by_hand import replica_step


@dataclass
class Bench:
    """A model on one rank, for tests of what happens when."""

    communicator: Communicator
    model: nn.Module
    optimizer: torch.optim.Optimizer
    replica: Replica
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]]

    @staticmethod
    def of(
        communicator: Communicator,
        model: nn.Module,
        lr: Any = 0.1,
        bucket_bytes: int = 2_000,
        kind: Callable[..., Any] = make_allreduce,
    ) -> Bench:
        own = copy.deepcopy(model)
        optimizer = torch.optim.SGD(own.parameters(), lr=lr, momentum=0.9)
        replica = replicate(own, optimizer, communicator, bucket_bytes, kind)
        dtype = next(own.parameters()).dtype
        batches = [(x.to(dtype), y) for x, y in Training.of(own).batches]
        return Bench(communicator, own, optimizer, replica, batches)

    def loss(self, batch: int) -> torch.Tensor:
        x, y = self.batches[batch]
        local = slice(self.communicator.rank, None, self.communicator.world_size)
        return F.cross_entropy(self.model(x[local]), y[local])

    def backward(self, batch: int) -> None:
        self.loss(batch).backward()

    def step(self, number: int, *, set_to_none: bool = True) -> None:
        with replica_step(self.replica, number, 1 / self.communicator.world_size):
            self.backward(number)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=set_to_none)

    def weights(self) -> list[torch.Tensor]:
        """Copy the parameters as they are, without the updates that are pending."""
        with torch._C.DisableTorchFunctionSubclass():
            return [p.detach().clone() for p in self.model.parameters()]
