"""A script's use of a gradient after backward means what it means in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from paceline.comm.communicator import Communicator
from paceline.errors import ConfigError
from tests.harness.equivalence.large_batch import Training, convnet
from tests.harness.equivalence.one_rank import Bench
from tests.harness.equivalence.put_synchronizers import KINDS
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.steps_by_hand import replica_step

Touch = Callable[[nn.Module, torch.optim.Optimizer], object]


def double_one(model: Any, _: object) -> None:
    model[2].weight.grad.mul_(2)


def replace_one(model: Any, _: object) -> None:
    model[2].weight.grad = model[2].weight.grad * 2


def remove_one(model: Any, _: object) -> None:
    model[2].weight.grad = None


TOUCHES: dict[str, Touch] = {
    "clip_grad_norm_": lambda m, _: nn.utils.clip_grad_norm_(m.parameters(), 1e-3),
    "clip_grad_value_": lambda m, _: nn.utils.clip_grad_value_(m.parameters(), 1e-3),
    "one in place": double_one,
    "one replaced": replace_one,
    "one set to None": remove_one,
    "zero_grad": lambda _, o: o.zero_grad(),
    "zero_grad in place": lambda _, o: o.zero_grad(set_to_none=False),
    "one added to each": lambda m, _: [p.grad.add_(1) for p in m.parameters()],  # type: ignore[union-attr]
}


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(1)
    return convnet()


def plain(model: nn.Module, step: Callable[[nn.Module, torch.optim.Optimizer, int], Any]) -> Any:
    """Train two steps of the whole batch in plain torch; return the parameters."""
    own = copy.deepcopy(model)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)
    for number in range(2):
        step(own, optimizer, number)
        optimizer.zero_grad()
    return list(own.parameters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bucket_bytes", [1, 2_000, 10**9])
@pytest.mark.parametrize("touch", TOUCHES.values(), ids=TOUCHES.keys())
def test_a_used_gradient_is_the_global_mean(
    model: nn.Module, touch: Touch, bucket_bytes: int, kind: str
) -> None:
    options = KINDS[kind]()

    def train(communicator: Communicator) -> list[nn.Parameter]:
        bench = Bench.of(communicator, model, bucket_bytes=bucket_bytes, **options)
        for number in range(2):
            with replica_step(bench.replica, number, 0.5):
                bench.backward(number)
                touch(bench.model, bench.optimizer)
                bench.optimizer.step()
                bench.optimizer.zero_grad()
        bench.replica.settle()
        bench.replica.drain()
        bench.replica.close()
        return list(bench.model.parameters())

    batches = Training.of(model).batches

    def step(own: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        x, y = batches[number]
        nn.functional.cross_entropy(own(x), y).backward()
        touch(own, optimizer)
        optimizer.step()

    expected = plain(model, step)
    for parameters in run_ranks(2, train):
        for ours, theirs in zip(parameters, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("how", ["step", "unscale and clip", "after reduce", "before reduce"])
def test_a_scaler_unscales_the_global_mean(model: nn.Module, how: str) -> None:
    batches = Training.of(model).batches

    def scaled(
        own: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, bench: Bench | None = None
    ) -> None:
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(nn.functional.cross_entropy(own(batch[0]), batch[1])).backward()
        if bench is not None and how == "after reduce":
            bench.replica.reduce()
        if how != "step":
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(own.parameters(), 0.1)
        if bench is not None and how == "before reduce":
            bench.replica.reduce()
        scaler.step(optimizer)
        scaler.update()

    def train(communicator: Communicator) -> list[nn.Parameter]:
        bench = Bench.of(communicator, model)
        for number in range(2):
            x, y = bench.batches[number]
            own = slice(communicator.rank, None, 2)
            with replica_step(bench.replica, number, 0.5):
                scaled(bench.model, bench.optimizer, (x[own], y[own]), bench)
                bench.optimizer.zero_grad()
        bench.replica.settle()
        return list(bench.model.parameters())

    expected = plain(model, lambda own, optimizer, n: scaled(own, optimizer, batches[n]))
    for parameters in run_ranks(2, train):
        for ours, theirs in zip(parameters, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def aliases(bench: Bench) -> list[torch.Tensor]:
    """Return the gradients as they are, as code does that has them from before."""
    with torch._C.DisableTorchFunctionSubclass():
        return [p.grad for p in bench.model.parameters() if p.grad is not None]


def test_a_write_through_an_alias_is_refused_and_the_parameter_named(model: nn.Module) -> None:
    def train(communicator: Communicator, reduces: bool) -> None:
        bench = Bench.of(communicator, model)
        with replica_step(bench.replica, 0, 1.0):
            bench.backward(0)
            aliases(bench)[2].mul_(2)
            if reduces:
                bench.replica.reduce()
            bench.optimizer.step()

    for reduces in (False, True):
        with pytest.raises(
            ConfigError, match=r"gradient of 2\.weight was modified .* in step 0, .*reduce\(\)"
        ):
            run_ranks(1, lambda c, r=reduces: train(c, r))  # type: ignore[misc]


def test_a_scaler_of_aliases_is_refused(model: nn.Module) -> None:
    def train(communicator: Communicator) -> None:
        bench, scaler = Bench.of(communicator, model), torch.amp.GradScaler("cpu")
        x, y = bench.batches[0]
        with replica_step(bench.replica, 0, 0.5):
            scaler.scale(nn.functional.cross_entropy(bench.model(x), y)).backward()
            for gradient in aliases(bench):
                gradient.data.mul_(0.5)  # autograd doesn't count this
            scaler.step(bench.optimizer)

    with pytest.raises(ConfigError, match=r"unscaled gradients .*call reduce\(\) after"):
        run_ranks(2, train)


def test_a_gradient_of_an_incomplete_bucket_is_reduced_too(model: nn.Module) -> None:
    model.register_module("never", nn.Linear(2, 2).double())

    def train(communicator: Communicator) -> None:
        bench = Bench.of(communicator, model, bucket_bytes=10**9)
        with replica_step(bench.replica, 0, 1.0):
            x, y = bench.batches[0]
            nn.functional.cross_entropy(bench.model[:7](x), y).backward()  # type: ignore[index]
            double_one(bench.model, None)
            assert bench.model.never.weight.grad is None  # type: ignore[union-attr]
            bench.optimizer.step()

    run_ranks(1, train)


def test_two_backward_passes_with_a_look_between_add_up(model: nn.Module) -> None:
    """The second exchange of a step; the sharpness-aware minimization of Foret et al. has two."""
    batches = Training.of(model).batches

    def twice(
        own: nn.Module, optimizer: torch.optim.Optimizer, one: Any, two: Any, accumulates: Any
    ) -> None:
        nn.functional.cross_entropy(own(one[0]), one[1]).backward()
        assert all(p.grad is not None for p in own.parameters())
        with accumulates():
            nn.functional.cross_entropy(own(two[0]), two[1]).backward()
        optimizer.step()

    def train(communicator: Communicator, accumulates: bool) -> list[nn.Parameter]:
        bench = Bench.of(communicator, model)
        for number in range(2):
            (x, y), (u, v) = bench.batches[number], bench.batches[number + 1]
            own = slice(communicator.rank, None, 2)
            how = bench.replica.no_sync if accumulates else nullcontext
            with replica_step(bench.replica, number, 0.5):
                pairs = (x[own], y[own]), (u[own], v[own])
                twice(bench.model, bench.optimizer, *pairs, how)
                bench.optimizer.zero_grad()
        bench.replica.settle()
        return list(bench.model.parameters())

    expected = plain(
        model, lambda own, o, n: twice(own, o, batches[n], batches[n + 1], nullcontext)
    )
    for accumulates in (False, True):
        for parameters in run_ranks(2, lambda c, a=accumulates: train(c, a)):  # type: ignore[misc]
            for ours, theirs in zip(parameters, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_accumulated_gradients_may_be_changed_until_the_last_backward(model: nn.Module) -> None:
    def train(communicator: Communicator) -> torch.Tensor:
        bench = Bench.of(communicator, model)
        with replica_step(bench.replica, 0, 1 / 2):
            with bench.replica.no_sync():
                bench.backward(0)
            for p in bench.model.parameters():
                assert p.grad is not None
                p.grad.zero_()
            bench.backward(1)
            bench.optimizer.step()
        return bench.model.state_dict()["0.bias"]

    def plain(communicator: Communicator) -> torch.Tensor:
        bench = Bench.of(communicator, model)
        with replica_step(bench.replica, 0, 1 / 2):
            bench.backward(1)
            bench.optimizer.step()
        return bench.model.state_dict()["0.bias"]

    torch.testing.assert_close(run_ranks(2, train)[0], run_ranks(2, plain)[0], rtol=0, atol=1e-12)


def test_a_step_that_goes_without_an_update_may_drop_its_gradients(model: nn.Module) -> None:
    def train(communicator: Communicator) -> bool:
        bench = Bench.of(communicator, model)
        before = bench.weights()
        with replica_step(bench.replica, 0, 1 / 2):
            bench.backward(0)
            bench.optimizer.zero_grad()
        bench.step(1)
        bench.replica.settle()
        return all(not torch.equal(a, b) for a, b in zip(before, bench.weights(), strict=True))

    assert all(run_ranks(2, train))


def test_reducing_twice_is_reducing_once(model: nn.Module) -> None:
    def train(communicator: Communicator, times: int) -> list[torch.Tensor]:
        bench = Bench.of(communicator, model)
        with replica_step(bench.replica, 0, 1 / 2):
            bench.backward(0)
            for _ in range(times):
                bench.replica.reduce()
            return [p.grad.clone() for p in bench.model.parameters() if p.grad is not None]

    once, twice = (run_ranks(2, lambda c, n=n: train(c, n))[0] for n in (1, 2))  # type: ignore[misc]
    assert once
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))


def test_reducing_outside_of_a_step_is_refused(model: nn.Module) -> None:
    def train(communicator: Communicator) -> None:
        Bench.of(communicator, model).replica.reduce()

    with pytest.raises(ConfigError, match=r"outside a step: call it within a step"):
        run_ranks(1, train)


def test_a_parameter_that_backward_reaches_only_after_reduce_is_exchanged(model: nn.Module) -> None:
    def train(communicator: Communicator) -> torch.Tensor:
        bench = Bench.of(communicator, nn.ModuleList([model, nn.Linear(2, 2).double()]))
        used, late = bench.model.children()
        x, y = bench.batches[0]
        with replica_step(bench.replica, 0, 0.5):
            nn.functional.cross_entropy(used(x), y).backward()
            bench.replica.reduce()
            late(torch.full((2, 2), communicator.rank).double()).sum().backward()
            return late.weight.grad  # type: ignore[no-any-return, return-value, union-attr]

    for gradient in run_ranks(2, train):
        assert torch.equal(gradient, torch.ones(2, 2).double())


def test_an_accumulating_backward_after_the_last_one_is_refused(model: nn.Module) -> None:
    def train(communicator: Communicator) -> None:
        bench = Bench.of(communicator, model)
        bench.step(0)
        with replica_step(bench.replica, 1, 1.0):
            bench.backward(1)
            with bench.replica.no_sync():
                bench.backward(1)

    with pytest.raises(ConfigError, match=r"accumulated twice in step 1: .*no_sync\(\)"):
        run_ranks(1, train)
