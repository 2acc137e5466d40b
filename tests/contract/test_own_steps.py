"""Optimizers that aren't torch's train as alone: each is stepped by its own `step()`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Muon, Optimizer

from paceline.algorithms.allreduce import make_allreduce
from paceline.comm.communicator import Communicator
from paceline.errors import ConfigError
from tests.harness.equivalence.large_batch import (
    Training,
    World,
    convnet,
    largest_difference,
    replicate,
    usual_step,
)
from tests.harness.equivalence.one_rank import Bench
from tests.harness.equivalence.put_synchronizers import notified
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.steps_by_hand import replica_step


class Lamb(Optimizer):
    """LAMB as timm has it: Adam's update, by a trust ratio a parameter.

    Gradients are first divided by the norm of *all* gradients, where that is over 1, and steps are
    counted in the parameter groups: neither can be done bucket by bucket.
    """

    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [
            p for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        clip = torch.clamp(norm, min=1.0)
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                gradient, state = p.grad.div_(clip), self.state[p]  # it writes its gradients
                if not state:
                    state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
                state["mean"].lerp_(gradient, 0.1)
                state["square"].lerp_(gradient.square(), 1e-3)
                mean = state["mean"] / (1 - 0.9 ** group["step"])
                square = state["square"] / (1 - 0.999 ** group["step"])
                update = mean / (square.sqrt() + 1e-6) + group["weight_decay"] * p
                ratio = p.norm() / update.norm()
                p.sub_(update * (ratio if ratio > 0 else 1.0), alpha=group["lr"])


class Counting(SGD):
    """SGD whose rate falls with a counter of its own, an attribute of the object."""

    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / self.count)


class Lookahead(Optimizer):
    """Lookahead: every third step the weights return half of the way to slow ones."""

    def __init__(self, base: Optimizer) -> None:
        self.base, self.steps = base, 0
        super().__init__(base.param_groups, {})
        self.param_groups = base.param_groups  # a schedule sets the rate of both
        self.slow = {p: p.detach().clone() for group in self.param_groups for p in group["params"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if self.steps == 0:  # parallelize() has given all ranks the same weights since
            self.slow = {p: p.clone() for p in self.slow}
        self.base.step()
        self.steps += 1
        if self.steps % 3 == 0:
            for p, slow in self.slow.items():
                slow.lerp_(p, 0.5)
                p.copy_(slow)


class SharpnessAware(Optimizer):
    """The descent half of sharpness-aware training: scales all gradients by their common norm."""

    def __init__(self, base: Optimizer) -> None:
        self.base = base
        super().__init__(base.param_groups, {})
        self.param_groups = base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        gradients = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.div_(norm + 1)
        self.base.step()


def wrapped(model: nn.Module) -> Optimizer:
    """Adam whose step a script has wrapped: it clips the gradients that it sees, and counts."""
    optimizer = Adam(model.parameters(), lr=1e-2)
    plain = optimizer.step

    def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        result = plain(*args, **kwargs)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.99)  # it sees updated parameters
        return result

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    return optimizer


class Matrices(nn.Module):
    """Linear layers without biases, as Muon takes them, in float64."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(192, 12, bias=False), nn.Linear(12, 10, bias=False)
        self.layers = nn.Sequential(nn.Flatten(), layers[0], nn.Tanh(), layers[1]).double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "Lamb": lambda m: Lamb(m.parameters()),
    "an own counter": lambda m: Counting(m.parameters(), lr=0.1),
    "Lookahead": lambda m: Lookahead(SGD(m.parameters(), lr=0.1, momentum=0.9)),
    "SAM": lambda m: SharpnessAware(SGD(m.parameters(), lr=0.1, momentum=0.9)),
    "a wrapped step": wrapped,
}
KINDS = {"allreduce": lambda: make_allreduce, "notified": lambda: notified(False)}


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(1)
    return convnet()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_of_ones_own_trains_as_alone(
    model: nn.Module, optimizer: str, name: str, world_size: int
) -> None:
    training = Training.of(model, OPTIMIZERS[optimizer])
    plain = training.alone()
    for state in training.on_threads(world_size, 2_000, KINDS[name]()):
        assert largest_difference(state, plain) < 1e-10


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", KINDS)
def test_muon_is_updated_bucket_by_bucket_as_alone(name: str, world_size: int) -> None:
    torch.manual_seed(1)
    training = Training.of(Matrices(), lambda m: Muon(m.parameters(), lr=1e-2))
    plain = training.alone()
    for state in training.on_threads(world_size, 1, KINDS[name]()):
        assert largest_difference(state, plain) < 1e-10


def set_rate(model: nn.Module, optimizer: Optimizer, number: int, rank: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.1 / (number + 1)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "make", [lambda m: SGD(m.parameters(), lr=1.0, momentum=0.9), OPTIMIZERS["Lookahead"]]
)
def test_rates_that_the_script_sets_count_from_their_step_on(
    model: nn.Module, make: Any, name: str, world_size: int
) -> None:
    training = Training.of(model, make, change=set_rate, gamma=1.0)
    plain = training.alone()
    for state in training.on_threads(world_size, 2_000, KINDS[name]()):
        assert largest_difference(state, plain) < 1e-10


def test_an_optimizers_counter_outlives_another_exchange(model: nn.Module) -> None:
    training = Training.of(model, OPTIMIZERS["an own counter"])
    later = [None, None, (KINDS["notified"](), 300), None, (KINDS["allreduce"](), 9_000)]
    plain = training.alone()
    for state in training.on_threads(2, 2_000, later=later):
        assert largest_difference(state, plain) < 1e-10


def closure_step(
    world: World, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor
) -> None:
    def closure() -> Tensor:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.zero_grad()


class ClosureSGD(SGD):
    """SGD of one's own, which evaluates the closure inside its step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])
        return loss


def test_a_closure_is_evaluated_by_the_optimizers_own_step(model: nn.Module) -> None:
    training = Training.of(
        model, lambda m: ClosureSGD(m.parameters(), lr=0.1), make_step=lambda: closure_step
    )
    plain = training.alone()
    for state in training.on_threads(2, 2_000):
        assert largest_difference(state, plain) < 1e-10


def test_an_own_step_that_ignores_its_closure_is_refused(model: nn.Module) -> None:
    def train(communicator: Communicator) -> None:
        optimizer = Counting(model.parameters(), lr=0.1)
        replica = replicate(model, optimizer, communicator, 2_000)
        with (
            replica_step(replica, 0, 1.0),
            pytest.raises(ConfigError, match=r"Counting\.step\(\) was given a"),
        ):
            optimizer.step(lambda: 0.0)
        replica.close()

    run_ranks(1, train)


def test_a_step_that_is_wrapped_after_parallelize_sees_updated_parameters(
    model: nn.Module,
) -> None:
    def train(communicator: Communicator) -> None:
        bench = Bench.of(communicator, model)
        plain = bench.optimizer.step
        seen: list[list[Tensor]] = []

        def step(*args: Any, **kwargs: Any) -> Any:
            result = plain(*args, **kwargs)
            seen.append([p.detach().clone() for p in bench.model.parameters()])
            return result

        bench.optimizer.step = step  # type: ignore[method-assign]
        bench.step(0)
        bench.replica.settle()
        for a, b in zip(seen[0], bench.model.parameters(), strict=True):
            assert torch.equal(a, b)

    run_ranks(2, train)


def clear_state(model: nn.Module, optimizer: Optimizer, number: int, rank: int) -> None:
    if number == 4:
        optimizer.state.clear()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", KINDS)
def test_a_state_that_is_cleared_in_mid_run_is_cleared_after_the_pending_update(
    model: nn.Module, name: str, world_size: int
) -> None:
    training = Training.of(model, change=clear_state)
    plain = training.alone()
    for state in training.on_threads(world_size, 2_000, KINDS[name]()):
        assert largest_difference(state, plain) < 1e-10


def test_a_state_that_is_read_after_a_step_is_that_of_the_step(model: nn.Module) -> None:
    alone = copy.deepcopy(model)
    plain = SGD(alone.parameters(), lr=0.1, momentum=0.9)

    def train(communicator: Communicator) -> list[Tensor]:
        bench = Bench.of(communicator, model)
        bench.step(0)
        assert bench.optimizer.state.get(torch.zeros(1)) is None
        return [bench.optimizer.state[p]["momentum_buffer"] for p in bench.model.parameters()]

    (ours,) = run_ranks(1, train)
    x, y = Training.of(model).batches[0]
    usual_step(None, alone, plain, x, y)  # type: ignore[arg-type]
    for p, momentum in zip(alone.parameters(), ours, strict=True):
        torch.testing.assert_close(plain.state[p]["momentum_buffer"], momentum)
