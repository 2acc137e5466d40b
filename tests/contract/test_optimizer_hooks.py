"""An optimizer's own step hooks see what they would see in plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from paceline.comm.communicator import Communicator
from tests.harness.equivalence.large_batch import convnet
from tests.harness.equivalence.one_rank import Bench
from tests.harness.equivalence.rank_threads import run_ranks


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(1)
    return convnet()


class Seen:
    """What a hook saw, each time that it ran."""

    def __init__(self) -> None:
        self.gradients: list[list[Tensor]] = []
        self.weights: list[list[Tensor]] = []
        self.optimizers: list[Optimizer] = []

    def __call__(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.gradients.append([p.grad.clone() for p in parameters if p.grad is not None])
        self.weights.append([p.detach().clone() for p in parameters])
        self.optimizers.append(optimizer)


def test_a_pre_hook_sees_the_mean_over_all_ranks_and_parameters_not_yet_updated(
    model: nn.Module,
) -> None:
    def train(communicator: Communicator) -> tuple[Seen, list[Tensor]]:
        bench, seen = Bench.of(communicator, model), Seen()
        bench.optimizer.register_step_pre_hook(seen)
        before = bench.weights()
        bench.step(0)
        return seen, before

    (one, before), (other, _) = run_ranks(2, train)
    assert len(one.gradients) == 1
    for a, b in zip(one.gradients[0], other.gradients[0], strict=True):
        assert torch.equal(a, b)
    for a, b in zip(one.weights[0], before, strict=True):
        assert torch.equal(a, b)


def test_a_post_hook_sees_the_updated_parameters(model: nn.Module) -> None:
    def train(communicator: Communicator) -> None:
        bench, seen = Bench.of(communicator, model), Seen()
        bench.optimizer.register_step_post_hook(seen)
        for number in range(2):
            before = bench.weights()
            bench.step(number)
            bench.replica.settle()
            for a, b, c in zip(before, seen.weights[number], bench.weights(), strict=True):
                assert not torch.equal(a, b)
                assert torch.equal(b, c)

    run_ranks(2, train)


@pytest.fixture
def everywhere() -> Iterator[Seen]:
    """Hooks before and after every optimizer's step in the process."""
    seen = Seen()
    handles = register_optimizer_step_pre_hook(seen), register_optimizer_step_post_hook(seen)
    yield seen
    for handle in handles:
        handle.remove()


def test_hooks_on_all_optimizers_run_once_a_step_for_the_users_own(
    model: nn.Module, everywhere: Seen
) -> None:
    def train(communicator: Communicator) -> Optimizer:
        bench = Bench.of(communicator, model, bucket_bytes=1)  # a part for each parameter
        bench.step(0)
        bench.step(1)
        bench.replica.settle()
        return bench.optimizer

    (optimizer,) = run_ranks(1, train)
    assert everywhere.optimizers == [optimizer] * 4  # before and after, two steps


def test_a_hook_may_be_taken_off_again(model: nn.Module) -> None:
    def train(communicator: Communicator) -> int:
        bench, seen = Bench.of(communicator, model), Seen()
        handle = bench.optimizer.register_step_pre_hook(seen)
        bench.step(0)
        handle.remove()
        before = bench.weights()
        bench.step(1)
        for a, b in zip(before, bench.weights(), strict=True):
            assert torch.equal(a, b)  # the update is put off again
        return len(seen.gradients)

    assert run_ranks(2, train) == [1, 1]
