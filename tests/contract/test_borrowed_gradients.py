"""Gradients that are sent from where they lie: what may be done to them, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from paceline.comm.communicator import Communicator
from paceline.errors import ConfigError
from tests.harness.equivalence.large_batch import largest_difference
from tests.harness.equivalence.one_rank import Bench
from tests.harness.equivalence.put_synchronizers import notified
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.steps_by_hand import replica_step


def wide(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Make a net whose first layer's gradient is large enough to be borrowed."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 40), nn.Tanh(), nn.Linear(40, 10)).to(dtype)


def steps(bench: Bench, between: Callable[[Tensor], object], *, settle: bool) -> dict[str, Tensor]:
    """Make three steps, between which something is done to the large gradient."""
    for number in range(3):
        with replica_step(bench.replica, number, 1 / bench.communicator.world_size):
            bench.backward(number)
            bench.optimizer.step()
        if settle:
            bench.replica.settle()
        weight = bench.model[1].weight  # type: ignore[index]
        between(weight)
    state = {name: value.clone() for name, value in bench.model.state_dict().items()}
    bench.replica.drain()
    bench.replica.close()
    return state


def zero(weight: Tensor) -> None:
    assert weight.grad is not None
    weight.grad.zero_()


def zero_unseen(weight: Tensor) -> None:
    assert weight.grad is not None
    weight.grad.data.zero_()


def zero_a_row_unseen(weight: Tensor) -> None:
    """Write a few values, of which one is in the sample that is compared."""
    assert weight.grad is not None
    weight.grad.data[0].zero_()


def replace(weight: Tensor) -> None:
    weight.grad = torch.zeros_like(weight)


def keep(weight: Tensor) -> None:
    """Let the next backward add to it."""


WRITES = {
    "zeroed": zero,
    "zeroed through .data": zero_unseen,
    "a row zeroed through .data": zero_a_row_unseen,
}


def train(
    write: Callable[[Tensor], object], machines: tuple[int, ...], *, settle: bool = False
) -> list[dict[str, Tensor]]:
    model, kind = wide(), notified(False, machines)
    return run_ranks(3, lambda c: steps(Bench.of(c, model, kind=kind), write, settle=settle))


def expected(write: Callable[[Tensor], object]) -> dict[str, Tensor]:
    """Train the same by all_reduce, which packs gradients."""
    model = wide()
    return run_ranks(3, lambda c: steps(Bench.of(c, model), write, settle=True))[0]


def by_alias(write: Callable[[Tensor], object]) -> Callable[[Tensor], object]:
    """Write as code does that has the gradient from before."""

    def unseen(weight: Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            write(weight)

    return unseen


@pytest.mark.parametrize("machines", [(), (2, 1)], ids=str)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_a_gradient_written_on_its_way_by_an_alias_is_refused_by_name(
    write: Callable[[Tensor], object], machines: tuple[int, ...]
) -> None:
    with pytest.raises(ConfigError, match=r"1\.weight was written after .*optimizer\.zero_grad\("):
        train(by_alias(write), machines)


def test_a_gradient_that_a_gpu_may_still_copy_is_refused_as_well() -> None:
    model, kind = wide(), notified(False, staged=True)
    with pytest.raises(ConfigError, match=r"1\.weight was written after .*optimizer\.zero_grad\("):
        run_ranks(3, lambda c: steps(Bench.of(c, model, kind=kind), by_alias(zero), settle=False))


@pytest.mark.parametrize("machines", [(), (2, 1)], ids=str)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_a_gradient_may_be_written_after_the_step(
    write: Callable[[Tensor], object], machines: tuple[int, ...]
) -> None:
    for state in train(write, machines):
        assert largest_difference(state, expected(write)) < 1e-10


@pytest.mark.parametrize("machines", [(), (2, 1)], ids=str)
@pytest.mark.parametrize("write", [*WRITES.values(), replace, keep])
def test_after_settle_it_may_be_written(
    write: Callable[[Tensor], object], machines: tuple[int, ...]
) -> None:
    for state in train(write, machines, settle=True):
        assert largest_difference(state, expected(write)) < 1e-10


@pytest.mark.parametrize("write", [replace, keep])
def test_it_may_be_replaced_or_kept(write: Callable[[Tensor], object]) -> None:
    for state in train(write, ()):
        assert largest_difference(state, expected(write)) < 1e-10


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_lower_precision(dtype: torch.dtype) -> None:
    model, kind = wide(dtype), notified(False)

    def train(communicator: Communicator) -> dict[str, Tensor]:
        bench = Bench.of(communicator, model, kind=kind)
        bench.batches = [(x.to(dtype), y) for x, y in bench.batches]
        return steps(bench, replace, settle=False)

    first, *others = run_ranks(3, train)
    assert all(largest_difference(first, other) == 0 for other in others)
    digits = {torch.float16: 3e-3, torch.bfloat16: 2e-2}
    assert largest_difference(first, expected(replace)) < digits[dtype]


def test_a_gradient_of_nans_is_not_taken_for_a_written_one() -> None:
    model, kind = wide(), notified(False)

    def train(communicator: Communicator) -> dict[str, Tensor]:
        bench = Bench.of(communicator, model, kind=kind)
        bench.batches = [(x * torch.nan, y) for x, y in bench.batches]
        return steps(bench, replace, settle=False)

    for state in run_ranks(2, train):
        assert bool(state["1.weight"].isnan().all())
