"""What a script does inside backward, or after one that failed, is refused on the spot."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.comm.communicator import Communicator
from paceline.errors import ConfigError
from tests.harness.equivalence.large_batch import convnet, replicate
from tests.harness.equivalence.one_rank import Bench
from tests.harness.equivalence.put_synchronizers import KINDS
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.steps_by_hand import replica_step


def benches(kind: str, work: Callable[[Bench], str]) -> list[str]:
    """Run two ranks; return what each got."""
    torch.manual_seed(1)
    model = convnet()
    options = KINDS[kind]()

    def on_rank(c: Communicator) -> str:
        return work(Bench.of(c, model, **options))

    return run_ranks(2, on_rank)


def refused(step: Callable[[], None]) -> str:
    with pytest.raises(ConfigError) as caught:
        step()
    return str(caught.value)


def step_in_hooks(bench: Bench, names: set[str]) -> None:
    """Let an optimizer step each parameter as soon as backward has its gradient."""
    for name, parameter in bench.model.named_parameters():
        if name in names:
            own = torch.optim.SGD([parameter], lr=0.1)

            def update(_: Tensor, own: torch.optim.Optimizer = own) -> None:
                own.step()

            parameter.register_post_accumulate_grad_hook(update)


@pytest.mark.parametrize("kind", ["allreduce", "notified", "sharded"])
def test_an_optimizer_that_steps_inside_backward_is_refused(kind: str) -> None:
    def work(bench: Bench) -> str:
        bench.step(0)
        step_in_hooks(bench, {"0.weight"})
        return refused(lambda: bench.step(1))

    for text in benches(kind, work):
        assert text.startswith("0.weight was written during backward: "), text


class Failing(torch.autograd.Function):
    """The identity, whose backward fails if its argument says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if ctx.fails:
            raise RuntimeError("out of memory")
        return gradients[0], None


@pytest.mark.parametrize("kind", ["allreduce", "notified", "sharded"])
def test_an_update_after_a_backward_that_failed_is_refused(kind: str) -> None:
    def work(bench: Bench) -> str:
        bench.step(0)
        assert isinstance(bench.model, nn.Sequential)
        middle = bench.model[3]
        middle.register_forward_hook(lambda *values: Failing.apply(values[-1], True))

        def step() -> None:
            with replica_step(bench.replica, 1, 0.5):
                with suppress(RuntimeError):
                    bench.backward(1)
                bench.optimizer.step()

        return refused(step)

    for text in benches(kind, work):
        assert "a backward pass of this step ended with an error that the script caught" in text


@pytest.mark.parametrize("kind", ["allreduce", "notified"])
def test_a_step_without_update_after_it_is_none(kind: str) -> None:
    def work(bench: Bench) -> str:
        bench.step(0)
        before = bench.weights()
        assert isinstance(bench.model, nn.Sequential)
        hook = bench.model[3].register_forward_hook(lambda *values: Failing.apply(values[-1], True))
        bench.replica.settle()
        settled = bench.weights()
        with replica_step(bench.replica, 1, 0.5), suppress(RuntimeError):
            bench.backward(1)
        bench.optimizer.zero_grad()
        bench.replica.settle()
        assert all(map(torch.equal, settled, bench.weights()))
        hook.remove()
        bench.step(2)
        bench.replica.settle()
        assert not any(map(torch.equal, before, bench.weights()))
        return ""

    benches(kind, work)


class Parts(nn.Module):
    """Layers that a script calls one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)


@pytest.mark.parametrize("kind", ["allreduce", "notified", "sharded"])
@pytest.mark.parametrize("bucket_bytes", [1, 10**6])
def test_an_update_that_no_forward_has_installed_is_no_write(kind: str, bucket_bytes: int) -> None:
    torch.manual_seed(1)
    initial, options = Parts().double(), KINDS[kind]()
    x = torch.randn(4, 3, dtype=torch.float64)

    def train(model: Parts, optimizer: torch.optim.Optimizer, replica: Any) -> list[Tensor]:
        for number in range(5):
            with nullcontext() if replica is None else replica_step(replica, number, 0.5):
                y = model.a(x) if number % 2 else model.b(model.a(x))
                y.square().mean().backward()
                optimizer.step()
            optimizer.zero_grad()
        if replica is not None:
            replica.settle()
        return list(model.parameters())

    def on_rank(c: Communicator) -> list[Tensor]:
        model = copy.deepcopy(initial)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return train(model, optimizer, replicate(model, optimizer, c, bucket_bytes, **options))

    plain = copy.deepcopy(initial)
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), None)
    for found in run_ranks(2, on_rank):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["allreduce", "notified", "sharded"])
def test_a_gradient_that_no_optimizer_has_is_refused(kind: str) -> None:
    """An optimizer that the script doesn't give would use this rank's gradients alone."""
    torch.manual_seed(1)
    initial, options = Parts().double(), KINDS[kind]()
    x = torch.randn(4, 3, dtype=torch.float64)

    def on_rank(c: Communicator) -> str:
        model = copy.deepcopy(initial)
        model.b.requires_grad_(False)
        optimizer = torch.optim.SGD(model.a.parameters(), lr=0.1, momentum=0.9)
        replica = replicate(model, optimizer, c, 10**6, **options)

        def step(number: int) -> None:
            with replica_step(replica, number, 0.5):
                model.b(model.a(x)).square().mean().backward()
                optimizer.step()
            optimizer.zero_grad()

        step(0)
        model.b.requires_grad_(True)
        return refused(lambda: step(1))

    for text in run_ranks(2, on_rank):
        assert text.startswith("b.weight has a gradient, but no optimizer that was given")
