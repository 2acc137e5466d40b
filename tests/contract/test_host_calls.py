"""A step calls torch as often as plain torch does, but for a few calls that layers don't add to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import paceline
from paceline.comm.communicator import Communicator
from tests.harness.equivalence.large_batch import replicate
from tests.harness.equivalence.put_synchronizers import KINDS
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.steps_by_hand import replica_step

LARGE = 256  # a layer has 263 kB: in several buckets, where there are several ranks
SMALL = 16
STEPS = 4  # the second one makes the momenta's first fused update

Step = Callable[[int], AbstractContextManager[object]]
Bind = Callable[[nn.Module, torch.optim.Optimizer], Step]


class Calls(TorchDispatchMode):
    """Counter of the operations that this thread calls, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names[function.__name__] += 1
        return function(*args, **(kwargs or {}))


def train(layers: int, size: int, bind: Bind) -> tuple[Counter[str], list[Tensor]]:
    """Train a few steps; return the calls of the last one, and the parameters."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(size, size) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    step = bind(model, optimizer)
    for number in range(STEPS):
        calls = Calls()
        with calls, step(number):
            model(torch.ones(2, size)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return calls.names, [p.detach().clone() for p in model.parameters()]


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    return lambda number: nullcontext()


def calls_of_a_layer(size: int, bind: Bind) -> Counter[str]:
    """Return the calls that a step has more of where the model has a layer more."""
    few, _ = train(4, size, bind)
    many, _ = train(5, size, bind)
    assert many >= few
    return many - few


@pytest.mark.parametrize("sync", ["auto", "notified"])
def test_a_world_of_one_updates_at_once_and_multiplies_nothing(sync: str) -> None:
    with paceline.join() as world:

        def bind(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
            paceline.parallelize(model, optimizer, world, sync=sync)  # type: ignore[arg-type]
            return lambda number: world.step()

        ours, weights = train(5, LARGE, bind)
    theirs, expected = train(5, LARGE, plain)
    more = ours - theirs
    assert ours["_fused_sgd_.default"] == 1
    assert not [name for name in more if "mul" in name or "foreach" in name]
    assert more.total() < len(weights)
    for one, other in zip(weights, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["alone", "allreduce", "notified"])
def test_layers_add_no_calls_to_those_of_plain_torch(kind: str) -> None:
    ranks = 1 if kind == "alone" else 2

    def run(layers: int) -> Counter[str]:
        options = {} if kind == "alone" else KINDS[kind]()

        def on_rank(communicator: Communicator) -> Counter[str]:
            def bind(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
                replica = replicate(model, optimizer, communicator, 10**6, **options)
                return lambda number: replica_step(replica, number, 1 / ranks)

            return train(layers, SMALL, bind)[0]

        return run_ranks(ranks, on_rank)[0]

    few, many = run(4), run(5)
    assert many - few == calls_of_a_layer(SMALL, plain)


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("weights", [(0.5, 0.5, 0.5, 0.5), (1.0, 1.0, 0.5, 1.0)], ids=str)
def test_a_world_of_one_weighs_gradients_where_samples_are_missing(
    weights: list[float], inner: bool
) -> None:
    """`inner`: where some are missing, backward reaches neither the first layer nor the last."""

    def loss(model: Any, x: Tensor, weight: float) -> Tensor:
        called = model[1] if inner and weight < 1 else model
        return called(x).square().mean()  # type: ignore[no-any-return]

    def parts() -> tuple[Any, torch.optim.Optimizer, Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        return model, optimizer, torch.randn(6, 4)

    def on_rank(communicator: Communicator) -> list[Tensor]:
        model, optimizer, x = parts()
        replica = replicate(model, optimizer, communicator, 10**6)
        seen = []
        for number, weight in enumerate(weights):
            with replica_step(replica, number, weight):
                loss(model, x, weight).backward()
                seen.append(model[1].weight.grad.clone())
                optimizer.step()
                optimizer.zero_grad()
        return [*seen, *model.state_dict().values()]

    model, optimizer, x = parts()
    seen = []
    for weight in weights:
        (loss(model, x, weight) * weight).backward()
        seen.append(model[1].weight.grad.clone())
        optimizer.step()
        optimizer.zero_grad()
    expected = [*seen, *model.state_dict().values()]
    for one, other in zip(run_ranks(1, on_rank)[0], expected, strict=True):
        assert torch.equal(one, other)
