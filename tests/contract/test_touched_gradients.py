"""A gradient that has been sent may not be changed without `reduce()`: noticed, and named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from paceline.comm.communicator import Communicator
from paceline.errors import ConfigError
from tests.harness.equivalence.large_batch import convnet
from tests.harness.equivalence.one_rank import Bench
from tests.harness.equivalence.rank_threads import run_ranks

Touch = Callable[[Bench], object]


def double_one(bench: Bench) -> None:
    weight = bench.model[2].weight  # type: ignore[index]
    weight.grad.mul_(2)


def replace_one(bench: Bench) -> None:
    weight = bench.model[2].weight  # type: ignore[index]
    weight.grad = weight.grad * 2


def remove_one(bench: Bench) -> None:
    bench.model[2].weight.grad = None  # type: ignore[index]


TOUCHES: dict[str, Touch] = {
    "clip_grad_norm_": lambda b: nn.utils.clip_grad_norm_(b.model.parameters(), 1e-3),
    "clip_grad_value_": lambda b: nn.utils.clip_grad_value_(b.model.parameters(), 1e-3),
    "one in place": double_one,
    "one replaced": replace_one,
    "one set to None": remove_one,
    "zero_grad": lambda b: b.optimizer.zero_grad(),
    "zero_grad in place": lambda b: b.optimizer.zero_grad(set_to_none=False),
    "a second gradient added by hand": lambda b: [p.grad.add_(1) for p in b.model.parameters()],  # type: ignore[union-attr]
}


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(1)
    return convnet()


@pytest.mark.parametrize("bucket_bytes", [1, 2_000, 10**9])
@pytest.mark.parametrize("touch", TOUCHES.values(), ids=TOUCHES.keys())
def test_a_touched_gradient_is_refused_and_reduce_is_named(
    model: nn.Module, touch: Touch, bucket_bytes: int
) -> None:
    def train(communicator: Communicator) -> None:
        bench = Bench.of(communicator, model, bucket_bytes=bucket_bytes)
        bench.step(0)
        with bench.replica.step(1, 0.5):
            bench.backward(1)
            touch(bench)
            bench.optimizer.step()

    with pytest.raises(ConfigError, match=r"was modified between .* in step 1, .*reduce\(\)"):
        run_ranks(2, train)


@pytest.mark.parametrize("reduce_first", [None, True, False])
def test_a_scaler_without_or_before_reduce_is_refused(
    model: nn.Module, reduce_first: bool | None
) -> None:
    def train(communicator: Communicator) -> None:
        bench = Bench.of(communicator, model)
        scaler = torch.amp.GradScaler("cpu")
        x, y = bench.batches[0]
        with bench.replica.step(0, 0.5):
            scaler.scale(nn.functional.cross_entropy(bench.model(x), y)).backward()
            if reduce_first:
                bench.replica.reduce()
            scaler.unscale_(bench.optimizer)
            if reduce_first is False:
                bench.replica.reduce()
            scaler.step(bench.optimizer)

    if reduce_first:
        run_ranks(2, train)
        return
    with pytest.raises(
        ConfigError, match=r"unscaled gradients that .* in step 0: call reduce\(\) after"
    ):
        run_ranks(2, train)


def test_a_scaler_that_unscales_by_itself_without_reduce_is_refused(model: nn.Module) -> None:
    def train(communicator: Communicator) -> None:
        bench = Bench.of(communicator, model)
        scaler = torch.amp.GradScaler("cpu")
        x, y = bench.batches[0]
        with bench.replica.step(0, 0.5):
            scaler.scale(nn.functional.cross_entropy(bench.model(x), y)).backward()
            scaler.step(bench.optimizer)

    with pytest.raises(ConfigError, match=r"unscaled gradients .*call reduce\(\) after"):
        run_ranks(2, train)


@pytest.mark.parametrize("touch", [double_one, replace_one, remove_one])
def test_the_touched_parameter_is_named(model: nn.Module, touch: Touch) -> None:
    def train(communicator: Communicator) -> None:
        bench = Bench.of(communicator, model)
        with bench.replica.step(0, 1.0):
            bench.backward(0)
            touch(bench)
            bench.optimizer.step()

    with pytest.raises(ConfigError, match=r"gradient of 2\.weight was modified"):
        run_ranks(1, train)


def test_a_gradient_touched_before_reduce_is_refused_there(model: nn.Module) -> None:
    def train(communicator: Communicator) -> None:
        bench = Bench.of(communicator, model)
        with bench.replica.step(0, 1.0):
            bench.backward(0)
            double_one(bench)
            bench.replica.reduce()

    with pytest.raises(ConfigError, match=r"2\.weight was modified"):
        run_ranks(1, train)


def test_a_gradient_of_an_incomplete_bucket_is_watched_too(model: nn.Module) -> None:
    model.register_module("never", nn.Linear(2, 2).double())

    def train(communicator: Communicator) -> None:
        bench = Bench.of(communicator, model, bucket_bytes=10**9)
        with bench.replica.step(0, 1.0):
            x, y = bench.batches[0]
            nn.functional.cross_entropy(bench.model[:7](x), y).backward()  # type: ignore[index]
            double_one(bench)
            bench.optimizer.step()

    with pytest.raises(ConfigError, match=r"2\.weight was modified"):
        run_ranks(1, train)


def test_accumulated_gradients_may_be_changed_until_the_last_backward(model: nn.Module) -> None:
    def train(communicator: Communicator) -> torch.Tensor:
        bench = Bench.of(communicator, model)
        with bench.replica.step(0, 1 / 2):
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
        with bench.replica.step(0, 1 / 2):
            bench.backward(1)
            bench.optimizer.step()
        return bench.model.state_dict()["0.bias"]

    torch.testing.assert_close(run_ranks(2, train)[0], run_ranks(2, plain)[0], rtol=0, atol=1e-12)


def test_a_step_that_goes_without_an_update_may_drop_its_gradients(model: nn.Module) -> None:
    def train(communicator: Communicator) -> bool:
        bench = Bench.of(communicator, model)
        before = bench.weights()
        with bench.replica.step(0, 1 / 2):
            bench.backward(0)
            bench.optimizer.zero_grad()
        bench.step(1)
        bench.replica.settle()
        return all(not torch.equal(a, b) for a, b in zip(before, bench.weights(), strict=True))

    assert all(run_ranks(2, train))


def test_reducing_twice_is_reducing_once(model: nn.Module) -> None:
    def train(communicator: Communicator, times: int) -> list[torch.Tensor]:
        bench = Bench.of(communicator, model)
        with bench.replica.step(0, 1 / 2):
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

    with pytest.raises(ConfigError, match=r"outside a step: call it within step\(\)"):
        run_ranks(1, train)


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_backward_after_reduce_is_refused(model: nn.Module, accumulates: bool) -> None:
    def train(communicator: Communicator) -> None:
        bench = Bench.of(communicator, model)
        with bench.replica.step(0, 1.0):
            bench.backward(0)
            bench.replica.reduce()
            if accumulates:
                with bench.replica.no_sync():
                    bench.backward(0)
            else:
                bench.backward(0)

    with pytest.raises(
        ConfigError, match=r"accumulated twice in step 0: .*call reduce\(\) only after"
    ):
        run_ranks(1, train)


def test_a_parameter_that_backward_reaches_only_after_reduce_is_refused(model: nn.Module) -> None:
    def train(communicator: Communicator) -> None:
        bench = Bench.of(communicator, nn.ModuleList([model, nn.Linear(2, 2).double()]))
        used, late = bench.model.children()
        x, y = bench.batches[0]
        with bench.replica.step(0, 1.0):
            nn.functional.cross_entropy(used(x), y).backward()
            bench.replica.reduce()
            late(torch.ones(2, 2).double()).sum().backward()

    with pytest.raises(
        ConfigError, match=r"1\.(weight|bias) was accumulated twice .*call reduce\(\) only after"
    ):
        run_ranks(1, train)


def test_an_accumulating_backward_after_the_last_one_is_refused(model: nn.Module) -> None:
    def train(communicator: Communicator) -> None:
        bench = Bench.of(communicator, model)
        with bench.replica.step(0, 1.0):
            bench.backward(0)
            with bench.replica.no_sync():
                bench.backward(0)

    with pytest.raises(ConfigError, match=r"accumulated twice in step 0: .*no_sync\(\)"):
        run_ranks(1, train)
