"""Parameters that a loop writes itself (clamps, projects) are as in plain torch, or refused."""

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


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(1)
    return convnet()


def clamp(model: nn.Module) -> None:
    with torch.no_grad():
        model[2].weight.clamp_(-0.05, 0.05)  # type: ignore[index, union-attr, operator]


def convert(model: nn.Module) -> None:
    weight = model[2].weight  # type: ignore[index]
    weight.data = weight.data.float()  # as `model.float()` does


@pytest.mark.parametrize("bucket_bytes", [1, 10**9])
@pytest.mark.parametrize("write", [clamp, convert])
def test_a_write_by_an_alias_before_the_update_is_refused(
    model: nn.Module, bucket_bytes: int, write: Callable[[nn.Module], None]
) -> None:
    def train(communicator: Communicator) -> None:
        bench = Bench.of(communicator, model, bucket_bytes=bucket_bytes)
        bench.step(0)
        with torch._C.DisableTorchFunctionSubclass():
            write(bench.model)
        with pytest.raises(ConfigError, match=r"^2\.weight was written .* Call settle\(\)"):
            bench.step(1)

    run_ranks(2, train)


def test_in_a_world_of_one_a_write_by_an_alias_counts(model: nn.Module) -> None:
    def train(communicator: Communicator) -> Bench:
        bench = Bench.of(communicator, model)
        for number in range(3):
            bench.step(number)
            with torch._C.DisableTorchFunctionSubclass():
                clamp(bench.model)
        return bench

    (bench,) = run_ranks(1, train)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in bench.batches[:3]:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        clamp(model)
    for ours, theirs in zip(bench.weights(), model.parameters(), strict=True):
        # On some processors the last bit depends on where in memory a tensor lies.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-15)


def settled(bench: Bench) -> None:
    bench.replica.settle()


def looked_at(bench: Bench) -> None:
    bench.model.state_dict()


def not_at_all(bench: Bench) -> None:
    """Leave it to the write itself."""


@pytest.mark.parametrize("settle", [settled, looked_at, not_at_all])
def test_a_write_after_a_step_counts(model: nn.Module, settle: Callable[[Bench], None]) -> None:
    def train(communicator: Communicator) -> list[torch.Tensor]:
        bench = Bench.of(communicator, model)
        for number in range(2):
            bench.step(number)
            settle(bench)
            clamp(bench.model)
        assert float(bench.model.state_dict()["2.weight"].abs().max()) <= 0.05
        bench.step(2)
        bench.replica.settle()
        return bench.weights()

    alone, *_ = run_ranks(1, train)
    for weights in run_ranks(2, train):
        for ours, theirs in zip(weights, alone, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
