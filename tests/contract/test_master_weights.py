"""Parameters of 16 bits with float32 masters at their owners, against the same rule by torch.

G       = sum over the ranks, in their order, of float32(gradient in 16 bits) * weight
master  = torch's optimizer in float32, by G; after `reduce()`, by G in 16 bits
p       = master in 16 bits
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from paceline.algorithms.sharded import make_sharded
from paceline.comm.communicator import Communicator
from paceline.state.state_copy import copy_state
from paceline.update.master_weights import MASTER, narrow, widen, with_masters
from paceline.update.shard_optimizer import ShardOptimizer
from tests.harness.equivalence.exchange_state import same
from tests.harness.equivalence.large_batch import replicate
from tests.harness.equivalence.put_synchronizers import notified
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.steps_by_hand import replica_step

STEPS = 6
WRITTEN = 2  # before this step, a script writes to a parameter
REDUCED = 4  # in this step, a script uses the summed gradients
WORLDS = [(1,), (2,), (1, 1), (2, 1)]
DTYPES = [torch.bfloat16, torch.float16]


def make_model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 6))


def make_optimizer(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def batch(number: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(number)
    return torch.randn(12, 24, generator=random), torch.randint(6, (12,), generator=random)


def loss_of(model: nn.Module, number: int, rank: int, size: int, dtype: torch.dtype) -> Tensor:
    x, y = (t[rank::size] for t in batch(number))
    with torch.autocast("cpu", dtype):
        scores = model(x)
    return F.cross_entropy(scores.float(), y)


def write(model: nn.Module, number: int) -> None:
    if number == WRITTEN:
        with torch.no_grad():
            next(model.parameters())[3] = 0.5


def train(
    machines: Sequence[int], dtype: torch.dtype, steps: range, start: Any = None
) -> dict[str, Any]:
    """Train on ranks that are threads; return what a checkpoint of rank 0 has."""
    kind: Any = notified(False, machines, "fp32", make_sharded)
    kind.updater = partial(ShardOptimizer, masters=True)
    size = sum(machines)
    first = make_model()

    def work(c: Communicator) -> Any:
        model = copy.deepcopy(first)
        optimizer = make_optimizer(model)
        if start is not None:
            model.load_state_dict(start["model"])
            optimizer.load_state_dict(start["optimizer"])
        narrow(model.parameters(), optimizer, dtype)
        assert [p.dtype for p in model.parameters()] == [dtype, torch.float32] * 2
        replica = replicate(model, optimizer, c, 2_000, kind)
        for number in steps:
            write(model, number)
            with replica_step(replica, number, 1 / size):
                loss_of(model, number, c.rank, size, dtype).backward()
                if number == REDUCED:
                    replica.reduce()
                optimizer.step()
                optimizer.zero_grad()
        state = replica.state()
        found = None
        if state is not None:
            entries = {"model": dict(model.state_dict())}
            narrowed = {0: ["0.weight"], 2: ["2.weight"]}
            assert entries["model"]["0.weight"].dtype is dtype
            masters = state["optimizer"]["state"][0][MASTER]
            assert torch.equal(masters.to(dtype), entries["model"]["0.weight"])
            saved = with_masters(entries["model"], state["optimizer"], narrowed)
            found = copy_state({**entries, "optimizer": saved})
        c.all_reduce(torch.zeros(1)).wait("all ranks")
        replica.close()
        return found

    return run_ranks(size, work)[0]  # type: ignore[no-any-return]


def reference(size: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Train by the rule in one process; return the masters."""
    model = make_model()
    masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=0.01)
    parameters = list(model.parameters())
    for p in parameters:
        p.data = p.data.to(dtype if p.dim() == 2 else p.dtype)
    for number in range(STEPS):
        write(model, number)
        if number == WRITTEN:
            masters[0].data[3] = 0.5
        sums = [torch.zeros_like(master) for master in masters]
        for rank in range(size):
            loss = loss_of(model, number, rank, size, dtype)
            for total, gradient in zip(sums, torch.autograd.grad(loss, parameters), strict=True):
                total += gradient.float() * (1 / size)
        for p, master, total in zip(parameters, masters, sums, strict=True):
            master.grad = total.to(p.dtype).float() if number == REDUCED else total
        optimizer.step()
        for p, master in zip(parameters, masters, strict=True):
            p.data.copy_(master.data)
    return {n: m.detach() for (n, _), m in zip(model.named_parameters(), masters, strict=True)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("machines", WORLDS, ids=str)
def test_masters_follow_the_rule_and_continue_from_a_checkpoint(
    machines: tuple[int, ...], dtype: torch.dtype
) -> None:
    found = train(machines, dtype, range(STEPS))
    expected = reference(sum(machines), dtype)
    for name, master in found["model"].items():
        assert master.dtype is torch.float32
        assert (master - expected[name]).abs().max() <= 1e-6
    assert all(MASTER not in own for own in found["optimizer"]["state"].values())
    half = train(machines, dtype, range(3))
    assert same(train(machines, dtype, range(3, STEPS), half), found)


def test_other_ranks_divide_the_masters_anew() -> None:
    def work(parts: Sequence[Any], c: Communicator, kind: Any) -> Any:
        model = copy.deepcopy(first)
        optimizer = make_optimizer(model)
        narrow(model.parameters(), optimizer, torch.bfloat16)
        replica = replicate(model, optimizer, c, 2_000, kind)
        state = replica._binding.state
        if parts:
            assert state.restore(copy_state(state.combine(parts)))
        for number in range(0 if parts else 2):
            with replica_step(replica, number, 1 / c.world_size):
                loss = loss_of(model, number, c.rank, c.world_size, torch.bfloat16)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        whole = replica.state()
        local = copy_state(state.local(in_step=False))
        assert state.restore_local(local)
        c.all_reduce(torch.zeros(1)).wait("all ranks")
        replica.close()
        return local, copy_state(whole)

    def on(machines: Sequence[int], parts: Sequence[Any] = ()) -> list[Any]:
        kind: Any = notified(False, machines, "fp32", make_sharded)
        kind.updater = partial(ShardOptimizer, masters=True)
        return run_ranks(sum(machines), lambda c: work(parts, c, kind))

    first = make_model()
    before = on((2, 1))
    after = on((2,), [local for local, _ in before])
    masters, found = (ranks[0][1]["optimizer"]["state"] for ranks in (before, after))
    assert MASTER in masters[0]
    assert same(found, masters)


def test_a_model_is_widened_before_a_file_is_loaded_into_it() -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    whole = copy_state(model.state_dict())
    narrow(model.parameters(), optimizer, torch.bfloat16)
    assert widen(model.parameters(), optimizer) is torch.bfloat16
    model.load_state_dict(whole)
    assert same(dict(model.state_dict()), dict(whole))
    assert not any(optimizer.state.values())
    assert widen(model.parameters(), optimizer) is None


@pytest.mark.parametrize("machines", WORLDS, ids=str)
def test_parameters_are_rounded_anew_of_masters_that_have_what_a_script_wrote(
    machines: tuple[int, ...],
) -> None:
    torch.manual_seed(3)
    first = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 7, bias=False))  # odd

    def work(c: Communicator) -> None:
        model = copy.deepcopy(first)
        optimizer = make_optimizer(model)
        narrow(model.parameters(), optimizer, torch.bfloat16)
        replica = replicate(model, optimizer, c, 20, kind)
        for number in range(2):
            with replica_step(replica, number, 1 / c.world_size):
                model(torch.full((2, 3), 1.0 + c.rank).bfloat16()).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        replica.settle()
        masters = replica.masters
        assert masters is not None
        matrices = [p for p in model.parameters() if p.dim() == 2]
        assert set(masters.parameters) == set(matrices)
        with torch.no_grad():
            matrices[1][3] = 0.3
        for p in matrices:
            masters.renew(p)
        state = replica._binding.state
        assert state is not None
        held = copy_state(state.local(in_step=False))
        expected = [p.detach().clone() for p in matrices]
        with torch.no_grad():
            for p in matrices:
                p.zero_()
                masters.renew(p)
        assert state.restore_local(held)
        masters.round(c)
        assert all(torch.equal(p, was) for p, was in zip(matrices, expected, strict=True))
        c.all_reduce(torch.zeros(1)).wait("all ranks")
        replica.close()

    kind: Any = notified(False, machines, "fp32", make_sharded)
    kind.updater = partial(ShardOptimizer, masters=True)
    run_ranks(sum(machines), work)
