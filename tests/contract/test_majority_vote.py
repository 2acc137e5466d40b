"""CONTRIBUTING.md's synchronizers in their row: the exact one, and one that votes by signs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

from paceline.comm.communicator import Communicator
from paceline.config import world
from paceline.wiring import exchange
from tests.harness.equivalence.contributed import contributed
from tests.harness.equivalence.large_batch import (
    Alone,
    State,
    Step,
    Training,
    convnet,
    largest_difference,
    usual_step,
)
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.steps_by_hand import replica_step
from tests.harness.processes.worlds import run_of


def sgd(model: nn.Module) -> Optimizer:
    """SGD whose product of a sign and the learning rate is exact, fused with the sum or not."""
    return torch.optim.SGD(model.parameters(), lr=2**-6)


def vote_alone(ranks: int) -> Step:
    """Return a step in one process by the votes of as many slices of its batch."""

    def step(
        _: object, model: nn.Module, optimizer: Optimizer, x: torch.Tensor, y: torch.Tensor
    ) -> None:
        parameters = [*model.parameters()]
        votes = [torch.zeros_like(p) for p in parameters]
        for images, labels in zip(x.tensor_split(ranks), y.tensor_split(ranks), strict=True):
            if len(images) == 0:
                continue
            gradients = torch.autograd.grad(F.cross_entropy(model(images), labels), parameters)
            for vote, gradient in zip(votes, gradients, strict=True):
                vote += gradient.sign()
        for p, vote in zip(parameters, votes, strict=True):
            p.grad = vote.sign()
        optimizer.step()

    return step


def train(training: Training, ranks: int, sync: str) -> list[State]:
    """Train on as many threads by `--sync`; return each one's state dict."""

    def on_rank(communicator: Communicator) -> State:
        model = copy.deepcopy(training.model)
        optimizer = training.make_optimizer(model)
        config = world.SyncConfig(sync=sync, bucket_mb=0.002)
        replica = exchange.replicate(model, optimizer, run_of(communicator), config)
        for number, (x, y) in enumerate(training.batches):
            images = x.tensor_split(ranks)[communicator.rank]
            labels = y.tensor_split(ranks)[communicator.rank]
            with replica_step(replica, number, len(images) / len(x)):
                if len(images) == 0:
                    images = x[:1]  # of weight 0
                    labels = y[:1]
                usual_step(Alone(), model, optimizer, images, labels)
        replica.drain()
        replica.close()
        return model.state_dict()

    return run_ranks(ranks, on_rank)


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the examples' rows to the two tables."""
    for name in ("at_end", "majority_vote"):
        monkeypatch.setitem(exchange.SYNCHRONIZERS, name, contributed()[f"_{name}"])
        monkeypatch.setitem(world.METHODS, name, 4)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_ranks_vote_as_slices_in_one_process_do(ranks: int) -> None:
    torch.manual_seed(1)
    training = Training.of(convnet(), sgd, gamma=1.0, make_step=lambda: vote_alone(ranks))
    for state in train(training, ranks, "majority_vote"):
        assert largest_difference(state, training.alone()) == 0


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_exact_example_trains_as_one_process_does(ranks: int) -> None:
    torch.manual_seed(1)
    training = Training.of(convnet(), sgd, gamma=1.0)
    for state in train(training, ranks, "at_end"):
        assert largest_difference(state, training.alone()) < 1e-10


def test_running_statistics_are_equal_on_all_ranks() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(
        convnet()[0], nn.BatchNorm2d(8).double(), nn.Flatten(), nn.Linear(512, 10).double()
    )
    first, *others = train(Training.of(model, sgd), 3, "majority_vote")
    assert first["1.running_mean"].abs().sum() > 0
    for other in others:
        assert largest_difference(other, first) == 0
