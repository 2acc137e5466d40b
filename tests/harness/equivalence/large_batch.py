"""Large-batch training twice: by plain torch in one process, and by Paceline on several ranks.

The same code of a step runs in both, on the whole batch here and on a slice there, so a case of the
grid is what its author would write for one process, and two lines that are nothing alone:
`world.no_sync()` and `world.reduce()`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from paceline.algorithms.allreduce import make_allreduce
from paceline.algorithms.method import Method
from paceline.comm.communicator import Communicator
from paceline.data.order import Order
from paceline.reduce.buckets import Bucket
from paceline.replica.replica import Replica
from paceline.update.batch_norm import BatchShare, RunningStatistics, convert_sync_batchnorm
from paceline.update.updater import make_updater
from tests.harness.equivalence.given_builder import GivenBuilder
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.steps_by_hand import replica_step
from tests.harness.processes.worlds import run_of
from tests.harness.twins.communicator import ThreadGroup

MakeOptimizer = Callable[[nn.Module], Optimizer]
State = dict[str, Tensor]
Kind = Callable[..., Any]
Later = Sequence[tuple[Kind, int] | None]  # at each step, another kind and size of a bucket


class World(Protocol):
    """What a step may ask for besides plain torch: a replica, or nobody."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate."""

    def reduce(self) -> None:
        """Make gradients the global mean."""


class Alone:
    """One process with the whole batch."""

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def reduce(self) -> None:
        """Have the global mean already."""


Step = Callable[[World, nn.Module, Optimizer, Tensor, Tensor], None]


def usual_step(world: World, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def usual() -> Step:
    """Make the usual step; a function with a name, which another process can be sent."""
    return usual_step


def no_change(model: nn.Module, optimizer: Optimizer, number: int, rank: int) -> None:
    """Leave model and optimizer as they are, before each step."""


def sgd(model: nn.Module) -> Optimizer:
    """SGD with Nesterov momentum, weight decay on matrices only: two parameter groups."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 1e-2}, {"params": vectors}]
    return torch.optim.SGD(
        [group for group in groups if group["params"]], lr=0.1, momentum=0.9, nesterov=True
    )


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


def made_up_batches(sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Make up batches of images (n, 3, 8, 8) of 10 classes."""
    random = torch.Generator().manual_seed(7)
    return [
        (
            torch.randn(n, 3, 8, 8, dtype=torch.float64, generator=random),
            torch.randint(0, 10, (n,), generator=random),
        )
        for n in sizes
    ]


@dataclass(frozen=True)
class Training:
    """A model, an optimizer, global batches, and what is done with them.

    Attributes:
        make_step: makes the code of a run's steps, which may keep something between them.
        change: is done to model and optimizer before each step.
        sync_bn: the ranks' BatchNorms are those of the whole batch.
        gamma: the learning rate's factor, a step.
        cuts: for each step and as many ranks as there are, the proportions in which they divide its
            batch; None: equally.
    """

    model: nn.Module
    make_optimizer: MakeOptimizer
    batches: Sequence[tuple[Tensor, Tensor]]
    make_step: Callable[[], Step] = usual
    change: Callable[[nn.Module, Optimizer, int, int], None] = no_change
    sync_bn: bool = False
    gamma: float = 0.9
    cuts: Sequence[Sequence[int]] | None = None

    @staticmethod
    def of(
        model: nn.Module, make_optimizer: MakeOptimizer = sgd, steps: int = 10, **more: Any
    ) -> Training:
        """Make up batches of 12 images, the last one of 5."""
        batches = made_up_batches([12] * (steps - 1) + [5])
        return Training(model, make_optimizer, batches, **more)

    def alone(self) -> State:
        """Train by plain torch; return the state dict."""
        model = copy.deepcopy(self.model)
        optimizer = self.make_optimizer(model)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, self.gamma)
        step = self.make_step()
        for number, (x, y) in enumerate(self.batches):
            self.change(model, optimizer, number, 0)
            step(Alone(), model, optimizer, x, y)
            schedule.step()
        return model.state_dict()

    def on_rank(
        self,
        communicator: Communicator,
        bucket_bytes: int,
        kind: Callable[..., Any] = make_allreduce,
        layers: Communicator | None = None,
        later: Later = (),
    ) -> State:
        """Train this rank's slices by Paceline; return the state dict."""
        model, share = copy.deepcopy(self.model), BatchShare()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(communicator.rank)  # must not matter: rank 0's are broadcast
        optimizer = self.make_optimizer(model)
        if self.sync_bn:
            assert layers is not None
            model = convert_sync_batchnorm(model, run_of(layers), share)
        replica = replicate(model, optimizer, communicator, bucket_bytes, kind, share, later)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, self.gamma)
        step = self.make_step()
        for number, (x, y) in enumerate(self.batches):
            self.change(model, optimizer, number, communicator.rank)
            own, weight = _share(len(x), communicator), None
            if self.cuts is not None:
                order, rank = Order(size=len(x), batch_size=len(x)), communicator.rank
                place = order.place(0, 0, rank, communicator.world_size, self.cuts[number])
                own, weight = place.computed, place.weight
            with replica_step(
                replica, number, (own.stop - own.start) / len(x) if weight is None else weight
            ):
                local = own if own.stop > own.start else slice(0, 1)
                step(replica, model, optimizer, x[local], y[local])
            schedule.step()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        replica.drain()
        replica.close()
        return state

    def on_threads(
        self,
        world_size: int,
        bucket_bytes: int,
        kind: Callable[..., Any] = make_allreduce,
        later: Later = (),
    ) -> list[State]:
        """Train on ranks that are threads; return each one's state dict."""
        layers = ThreadGroup(world_size)
        return run_ranks(
            world_size,
            lambda c: self.on_rank(c, bucket_bytes, kind, layers.communicator(c.rank), later),
        )

    def with_model(self, model: nn.Module) -> Training:
        """Return the same training of another model."""
        return replace(self, model=model)


def replicate(
    model: nn.Module,
    optimizer: Optimizer,
    communicator: Communicator,
    bucket_bytes: int,
    kind: Callable[..., Any] = make_allreduce,
    share: BatchShare | None = None,
    later: Later = (),
) -> Replica:
    """Give all ranks rank 0's model and bind it to a synchronizer, and later to others."""

    def make(kind: Kind, buckets: Sequence[Bucket]) -> Method:
        updater = getattr(kind, "updater", make_updater)(optimizer, buckets)
        parts = updater, RunningStatistics(model)
        return Method.by_gradients(kind(buckets, communicator, *parts))

    changes = (change and (partial(make, change[0]), change[1]) for change in later)
    builder = GivenBuilder(partial(make, kind), bucket_bytes, later=changes)
    return Replica(model, optimizer, run_of(communicator), builder, share=share)


def largest_difference(one: State, other: State) -> float:
    """Return the largest absolute difference of two state dicts with the same names."""
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def _share(samples: int, communicator: Communicator) -> slice:
    """Cut `samples` into slices in rank order; written again here, as an independent reference."""
    each, rest = divmod(samples, communicator.world_size)
    rank = communicator.rank
    first = rank * each + min(rank, rest)
    return slice(first, first + each + (rank < rest))
