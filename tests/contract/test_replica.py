"""When results are installed, who sees them, and what is refused: the rules around the exchange."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.algorithms.allreduce import make_allreduce
from paceline.comm.communicator import Communicator
from paceline.errors import ConfigError
from paceline.replica.model_statistics import ModelStatistics
from tests.harness.equivalence.large_batch import (
    Training,
    convnet,
    largest_difference,
    replicate,
    sgd,
)
from tests.harness.equivalence.one_rank import Bench
from tests.harness.equivalence.put_synchronizers import notified
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.steps_by_hand import replica_step
from tests.harness.processes.worlds import run_of
from tests.harness.twins.communicator import ThreadCommunicator, ThreadGroup


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(1)
    return convnet()


# Rules that are easy to break without another test noticing.


def differ(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return any(not torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_nothing_is_updated_before_the_next_forward_or_settling(model: nn.Module) -> None:
    def train(communicator: Communicator) -> None:
        bench = Bench.of(communicator, model)
        bench.step(0)
        before = bench.weights()
        with replica_step(bench.replica, 1, 0.5):
            bench.backward(1)  # installs step 0's result
            first = bench.weights()
            assert differ(before, first)
            bench.model(bench.batches[1][0])  # a second forward in the same step
            assert not differ(first, bench.weights())
            bench.optimizer.step()
            assert not differ(first, bench.weights())
        bench.model.eval()
        assert differ(first, bench.weights())

    run_ranks(2, train)


@pytest.mark.parametrize(
    "look", ["eval", "state_dict", "optimizer.state_dict", "optimizer.load_state_dict", "forward"]
)
def test_whoever_looks_sees_the_last_step(model: nn.Module, look: str) -> None:
    def train(communicator: Communicator) -> bool:
        bench = Bench.of(communicator, model)
        state = copy.deepcopy(bench.optimizer.state_dict())
        bench.step(0)
        before = bench.weights()
        if look == "eval":
            bench.model.eval()
        elif look == "state_dict":
            bench.model[0].state_dict()  # type: ignore[index]  # a part's, too
        elif look == "optimizer.state_dict":
            bench.optimizer.state_dict()
        elif look == "optimizer.load_state_dict":
            bench.optimizer.load_state_dict(state)
        else:
            bench.model(bench.batches[0][0])
        return differ(before, bench.weights())

    assert all(run_ranks(2, train))


def test_loaded_weights_are_not_updated_by_an_earlier_step(model: nn.Module) -> None:
    def train(communicator: Communicator) -> float:
        bench = Bench.of(communicator, model)
        bench.step(0)
        bench.model.load_state_dict({n: 0 * v for n, v in model.state_dict().items()})
        bench.model.eval()
        return max(float(p.detach().abs().max()) for p in bench.model.parameters())

    assert run_ranks(2, train) == [0, 0]


def test_loaded_optimizer_state_is_used(model: nn.Module) -> None:
    def train(communicator: Communicator, reload: bool) -> dict[str, torch.Tensor]:
        bench = Bench.of(communicator, model)
        for number in range(6):
            bench.step(number)
            if reload and number == 2:
                bench.optimizer.load_state_dict(copy.deepcopy(bench.optimizer.state_dict()))
                for state in bench.optimizer.state.values():
                    state["momentum_buffer"].zero_()
        return bench.model.state_dict()

    plain, reloaded = (run_ranks(2, partial(train, reload=r))[0] for r in (False, True))
    assert largest_difference(plain, reloaded) > 1e-3  # the zeroed momentum was seen


def test_a_learning_rate_in_a_tensor_is_that_of_the_optimizers_step(model: nn.Module) -> None:
    def train(communicator: Communicator) -> list[torch.Tensor]:
        rate = torch.tensor(0.1, dtype=torch.float64)
        bench = Bench.of(communicator, model, lr=rate)
        bench.step(0)
        before = bench.weights()
        rate.zero_()  # as a scheduler does, after the optimizer's step
        bench.model.eval()
        return [a - b for a, b in zip(before, bench.weights(), strict=True)]

    assert any(change.abs().max() > 0 for change in run_ranks(2, train)[0])


@pytest.mark.parametrize("set_to_none", [True, False])
def test_reduced_gradients_are_the_callers_to_keep(model: nn.Module, set_to_none: bool) -> None:
    def train(communicator: Communicator) -> dict[str, torch.Tensor]:
        bench = Bench.of(communicator, model)
        for number in range(6):
            with replica_step(bench.replica, number, 1 / 2):
                bench.backward(number)
                if number % 2 == 0:
                    bench.replica.reduce()
                bench.optimizer.step()
                bench.optimizer.zero_grad(set_to_none=set_to_none)
        return bench.model.state_dict()

    def alone(communicator: Communicator) -> dict[str, torch.Tensor]:
        bench = Bench.of(communicator, model)
        for number in range(6):
            bench.step(number)
        return bench.model.state_dict()

    one, other = run_ranks(2, train)
    assert largest_difference(one, other) == 0
    assert largest_difference(one, run_ranks(1, alone)[0]) < 1e-10


def test_one_rank_alone_may_look_at_the_statistics() -> None:
    torch.manual_seed(8)
    model = nn.Sequential(nn.BatchNorm1d(4, momentum=0.5), nn.Linear(4, 2)).double()
    x = torch.randn(5, 2, 6, 4, dtype=torch.float64)

    def train(communicator: Communicator, looks: bool) -> dict[str, torch.Tensor]:
        own = copy.deepcopy(model)
        optimizer = sgd(own)
        replica = replicate(own, optimizer, communicator, 10**6)
        for number in range(5):
            with replica_step(replica, number, 0.5):
                out = own(x[number, communicator.rank])
                if looks and communicator.rank == 0:
                    own.state_dict()
                out.square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            if looks and communicator.rank == 0:
                own.state_dict()
        return own.eval().state_dict()

    looked, plain = (run_ranks(2, partial(train, looks=looks)) for looks in (True, False))
    assert largest_difference(looked[0], plain[0]) == 0
    assert largest_difference(looked[1], looked[0]) == 0


@pytest.mark.parametrize("by_puts", [False, True], ids=["allreduce", "notified"])
def test_running_statistics_are_weighted_by_samples(by_puts: bool) -> None:
    """A rank whose share is empty computes on a placeholder, which counts nothing."""
    torch.manual_seed(8)
    model = nn.Sequential(nn.BatchNorm1d(4, momentum=0.5), nn.Linear(4, 2)).double()
    x, cuts = torch.randn(5, 12, 4, dtype=torch.float64), [0, 7, 7, 12]
    kind = notified(True) if by_puts else make_allreduce

    def train(communicator: Communicator) -> dict[str, torch.Tensor]:
        own = copy.deepcopy(model)
        optimizer = sgd(own)
        replica = replicate(own, optimizer, communicator, 10**6, kind)
        begin, end = cuts[communicator.rank : communicator.rank + 2]
        for number in range(5):
            with replica_step(replica, number, (end - begin) / 12):
                part = x[number, begin:end]
                own(part if begin < end else torch.full((2, 4), math.inf).double()).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        state = own.eval().state_dict()
        replica.drain()
        replica.close()
        return state

    mean, var = torch.zeros(4).double(), torch.ones(4).double()
    for batch in x:
        slices = [(batch[:7], 7 / 12), (batch[7:], 5 / 12)]
        mean = 0.5 * mean + 0.5 * sum(w * part.mean(0) for part, w in slices)
        var = 0.5 * var + 0.5 * sum(w * part.var(0) for part, w in slices)
    for state in run_ranks(3, train):
        torch.testing.assert_close(state["0.running_mean"], mean, rtol=0, atol=1e-12)
        torch.testing.assert_close(state["0.running_var"], var, rtol=0, atol=1e-12)


def test_statistics_of_one_model_among_several_are_weighted_by_samples() -> None:
    def exchange(communicator: Communicator) -> torch.Tensor:
        model = nn.BatchNorm1d(2, affine=False).double()
        statistics = ModelStatistics(model, run_of(communicator), "steps")
        model.running_mean.fill_((1.0, 4.0, math.nan)[communicator.rank])  # type: ignore[union-attr, operator]
        statistics.exchange((0.75, 0.25, 0.0)[communicator.rank])
        statistics.install()
        return torch.cat([model.running_mean, model.running_var])  # type: ignore[list-item]

    for found in run_ranks(3, exchange):
        assert found.tolist() == [1.75, 1.75, 1.0, 1.0]


def test_frozen_statistics_stay_to_the_bit() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    with torch.no_grad():
        model[0].running_mean.copy_(torch.tensor([0.1, 0.7, 1.3]))

    def train(communicator: Communicator) -> torch.Tensor:
        own = copy.deepcopy(model)
        own[0].eval()
        optimizer = sgd(own)
        replica = replicate(own, optimizer, communicator, 10**6)
        for number in range(10):
            with replica_step(replica, number, 1 / 3):
                own(torch.ones(4, 3)).sum().backward()
                optimizer.step()
        return own.state_dict()["0.running_mean"]

    assert torch.equal(run_ranks(3, train)[0], model[0].running_mean)


class ReadsOutside(nn.Module):
    """Is read by the loop: always its bias; its last layer too, which only some steps call."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(10))
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(192, 10))
        self.extra = nn.Linear(10, 10)

    def forward(self, x: torch.Tensor, deep: bool) -> torch.Tensor:
        return self.extra(self.body(x)) if deep else self.body(x)


def calls_a_part(model: Any, x: torch.Tensor, number: int) -> torch.Tensor:
    return model.bias + model.body(x)  # the model itself is never called


def adds_a_penalty(model: Any, x: torch.Tensor, number: int) -> torch.Tensor:
    return model(x, deep=number % 2 == 0) + model.bias + model.extra.weight.square().sum(0)


@pytest.mark.parametrize("forward", [calls_a_part, adds_a_penalty])
def test_what_is_read_outside_of_a_module_is_never_stale(
    forward: Callable[[Any, torch.Tensor, int], torch.Tensor],
) -> None:
    torch.manual_seed(9)
    model = ReadsOutside().double()

    def train(communicator: Communicator) -> dict[str, torch.Tensor]:
        bench = Bench.of(communicator, model, bucket_bytes=1)
        for number, (x, y) in enumerate(bench.batches):
            local = slice(communicator.rank, None, communicator.world_size)
            with replica_step(bench.replica, number, len(x[local]) / len(x)):
                F.cross_entropy(forward(bench.model, x[local], number), y[local]).backward()
                bench.optimizer.step()
                bench.optimizer.zero_grad()
        return bench.model.state_dict()

    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for number, (x, y) in enumerate(Training.of(model).batches):
        F.cross_entropy(forward(alone, x, number), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert largest_difference(run_ranks(2, train)[0], alone.state_dict()) < 1e-10


def test_an_evaluation_in_inference_mode_may_be_what_installs(model: nn.Module) -> None:
    def train(communicator: Communicator) -> None:
        bench = Bench.of(communicator, model)
        bench.step(0)
        with torch.inference_mode():
            bench.model.eval()
            bench.model(bench.batches[0][0])
        bench.model.train()
        bench.step(1)
        bench.replica.settle()

    run_ranks(2, train)


def test_a_copy_of_the_model_trains_and_evaluates_by_itself(model: nn.Module) -> None:
    def train(communicator: Communicator) -> None:
        bench = Bench.of(communicator, model)
        bench.step(0)
        average = copy.deepcopy(bench.model)
        average.eval()
        assert bench.model.training
        assert not average.training
        average(bench.batches[0][0])
        bench.step(1)

    run_ranks(2, train)


def test_a_sparse_gradient_of_a_layer_without_sparse_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2))

    def train(communicator: Communicator) -> None:
        own = copy.deepcopy(model)
        optimizer = sgd(own)
        replica = replicate(own, optimizer, communicator, 10**6)
        with replica_step(replica, 0, 1.0):
            F.embedding(torch.tensor([[0, 1]]), own[0].weight, sparse=True).sum().backward()

    with pytest.raises(ConfigError, match=r"0\.weight is sparse"):
        run_ranks(1, train)


def test_a_model_parameter_that_the_optimizer_does_not_know_stays(model: nn.Module) -> None:
    def train(communicator: Communicator) -> bool:
        own = copy.deepcopy(model).requires_grad_(False)
        own[6].requires_grad_(True)  # type: ignore[index]
        optimizer = torch.optim.SGD(own[6].parameters(), lr=0.1)  # type: ignore[index]
        replica = replicate(own, optimizer, communicator, 2_000)
        x, y = Training.of(own).batches[0]
        with replica_step(replica, 0, 0.5):
            F.cross_entropy(own(x), y).backward()
            optimizer.step()
        after = own.state_dict()
        return torch.equal(after["0.weight"], model[0].weight)  # type: ignore[index]

    assert all(run_ranks(2, train))


def test_closing_takes_everything_off_model_and_optimizer(model: nn.Module) -> None:
    def train(communicator: Communicator) -> None:
        bench = Bench.of(communicator, model)
        bench.step(0)
        bench.model.eval()
        bench.replica.close()
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in bench.model.modules())
        assert not any(p._post_accumulate_grad_hooks for p in bench.model.parameters())
        assert "step" not in vars(bench.optimizer)
        assert "train" not in vars(bench.model)

    run_ranks(1, train)


class CountsStartups(ThreadCommunicator):
    """Counts how often the start-up was said to be over."""

    ended_startups = 0

    def end_startup(self) -> None:
        self.ended_startups += 1


def test_the_start_up_is_over_with_the_first_complete_exchange(model: nn.Module) -> None:
    communicator = CountsStartups(ThreadGroup(1), 0)
    bench = Bench.of(communicator, model)
    bench.step(0)
    assert communicator.ended_startups == 0  # others may not have begun their first step
    bench.step(1)
    assert communicator.ended_startups > 0
