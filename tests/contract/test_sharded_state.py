"""The optimizer's state, of which each rank has a share, is kept whole and dealt out anew."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.algorithms.notified import make_notified
from paceline.algorithms.sharded import make_sharded
from paceline.comm.communicator import Communicator
from paceline.errors import ConfigError
from tests.harness.equivalence.exchange_state import (
    Rank,
    State,
    adam,
    missed,
    same,
    sgd,
    totals,
    train,
    with_ranks,
)
from tests.harness.equivalence.large_batch import replicate
from tests.harness.equivalence.put_synchronizers import notified
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.steps_by_hand import replica_step

MACHINES = [(1, 1), (1, 1, 1), (2, 1), (2, 2)]


@pytest.mark.parametrize("machines", MACHINES, ids=str)
@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_shards_of_the_optimizers_state_go_on_with_the_same_bits(
    machines: tuple[int, ...], wire: str
) -> None:
    more = {"kind": make_sharded, "make_optimizer": adam}
    whole = train(machines, wire, range(6), **more)
    half = train(machines, wire, range(3), **more)
    assert same(train(machines, wire, range(3, 6), half, **more), whole)


@pytest.mark.parametrize("make_optimizer", [sgd, adam])
def test_the_state_of_all_shards_is_that_of_a_whole_optimizer(make_optimizer: Any) -> None:
    sharded, replicated = (
        train((1, 1, 1), "fp32", range(3), kind=kind, make_optimizer=make_optimizer)
        for kind in (make_sharded, make_notified)
    )
    assert not sharded["exchange"]
    assert close(sharded, replicated)
    assert strides(sharded["optimizer"]) == strides(replicated["optimizer"])


@pytest.mark.parametrize(
    ("machines", "kind"),
    [((2, 1), make_sharded), ((1,), make_sharded), ((1, 1), make_notified)],
    ids=["sharded, two and one", "sharded, one", "replicated, one and one"],
)
def test_shards_are_dealt_out_anew_to_other_ranks_and_to_replicas(
    machines: tuple[int, ...], kind: Any
) -> None:
    whole = train((1, 1, 1), "fp32", range(6), make_optimizer=adam)
    half = train((1, 1, 1), "fp32", range(3), kind=make_sharded, make_optimizer=adam)
    more = {"kind": kind, "make_optimizer": adam, "bucket_bytes": 10**9}
    assert close(train(machines, "fp32", range(3, 6), half, **more), whole)


def close(one: Any, other: Any) -> bool:
    """Compare two trees as far as float32 goes, in another order of sums."""
    if isinstance(one, Tensor):
        return torch.allclose(one, other, atol=1e-4)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(close(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(close, one, other))
    return bool(one == other)


def strides(state: State) -> dict[int, dict[str, Any]]:
    return {
        number: {name: value.stride() for name, value in entry.items()}
        for number, entry in state["state"].items()
    }


def test_what_owners_had_yet_to_send_back_goes_into_their_update() -> None:
    start = train((1, 1), "int8", range(3))
    machines, more = (
        (1, 1, 1),
        {"kind": make_sharded},
    )  # three owners: the total is dealt out to them
    with_it = train(machines, "int8", range(3, 4), start, **more)
    without = train(machines, "int8", range(3, 4), {**start, "exchange": {}}, **more)
    for name, total in totals(start).items():
        difference = without["model"][name] - with_it["model"][name]
        assert torch.allclose(difference, 0.1 * total, atol=1e-6)  # the rate's part
        assert total.abs().max() > 1e-4
    assert same(with_it["exchange"], without["exchange"])  # it is sent


def test_what_was_missed_of_reduced_gradients_is_as_with_replicas() -> None:
    def train(kind: Any) -> list[dict[str, Tensor]]:
        def work(c: Communicator) -> State:
            rank = Rank(c, make, None)
            with replica_step(rank.replica, 0, 0.5):
                rank.backward(0)
                rank.replica.reduce()
                rank.optimizer.step()
            state = rank.state()
            rank.replica.close()
            return state

        make = notified(False, (1, 1), "int8", kind)
        return missed(run_ranks(2, work)[0])

    sharded, replicated = train(make_sharded), train(make_notified)
    assert same(sharded, replicated)
    assert all(value.any() for value in sharded[0].values())


def test_what_a_rank_has_of_a_divided_state_is_not_shown_as_the_whole() -> None:
    def work(rank: Rank) -> None:
        rank.train(0)
        with pytest.raises(ConfigError, match=r"world\.checkpoint\(\)"):
            rank.optimizer.state_dict()

    with_ranks(work, kind=make_sharded)


def test_a_state_that_is_loaded_is_dealt_out() -> None:
    start = train((1, 1), "fp32", range(2), make_optimizer=sgd)

    def work(rank: Rank) -> None:
        rank.train(0)
        rank.optimizer.load_state_dict(copy.deepcopy(start["optimizer"]))
        state = rank.state()
        if rank.communicator.rank == 0:
            assert same(state["optimizer"], start["optimizer"])

    with_ranks(work, kind=make_sharded)


def test_a_parameter_that_is_written_before_its_update_is_refused() -> None:
    def work(rank: Rank) -> None:
        rank.train(0)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            next(rank.model.parameters()).clamp_(-1, 1)
        with pytest.raises(ConfigError, match=r"0\.weight was written"):
            rank.replica.settle()

    with_ranks(work, kind=make_sharded)


@pytest.mark.parametrize("then", ["the next forward", "a checkpoint"])
def test_another_memory_format_is_refused(then: str) -> None:
    def work(rank: Rank) -> None:
        rank.train(0)
        rank.replica.settle()
        weight = next(p for p in rank.model.parameters() if p.ndim == 2)
        weight.data = weight.data.t().contiguous().t()  # as `model.to(memory_format=…)` does
        with pytest.raises(ConfigError, match=r"6\.weight changed its memory format"):
            rank.train(1) or rank.replica.settle() if "forward" in then else rank.state()

    with_ranks(work, kind=make_sharded)


def test_an_optimizer_whose_update_cannot_be_divided_is_refused() -> None:
    def work(c: Communicator) -> None:
        kind = notified(False, (1,), kind=make_sharded)
        with pytest.raises(ConfigError, match="does not support Adafactor"):
            Rank(c, kind, None, make_optimizer=lambda m: torch.optim.Adafactor(m.parameters()))

    run_ranks(1, work)


def test_a_use_of_a_divided_state_is_refused_until_the_run_has_ended() -> None:
    def work(rank: Rank) -> None:
        p = next(rank.model.parameters())
        rank.train(0)
        p.grad = torch.ones_like(p)
        for use in (
            lambda: rank.optimizer.state[p],
            lambda: rank.optimizer.state.clear(),
            lambda: rank.optimizer.state.items().__len__(),
            lambda: rank.optimizer.step(),  # outside of a step: by this rank's gradients alone
        ):
            with pytest.raises(ConfigError, match=r"optimizer\.state would contain nothing"):
                use()
        rank.replica.settle()
        rank.replica.close()
        assert len(rank.optimizer.state) == 0

    with_ranks(work, kind=make_sharded)


def test_two_parameters_over_the_same_memory_are_refused() -> None:
    memory = torch.randn(6, 4)

    def work(c: Communicator) -> None:
        model = nn.Module()
        model.one, model.other = nn.Parameter(memory[:4]), nn.Parameter(memory[3:])
        kind = notified(False, (1,), kind=make_sharded)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ConfigError, match="one and other are two Parameters over the same"):
            replicate(model, optimizer, c, 10**6, kind)
        apart = nn.Module()
        apart.one, apart.other = nn.Parameter(memory[:3]), nn.Parameter(memory[3:])
        replicate(apart, torch.optim.SGD(apart.parameters(), lr=0.1), c, 10**6, kind).close()

    run_ranks(1, work)


def test_an_optimizer_whose_step_was_replaced_is_refused() -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
        return optimizer

    def work(c: Communicator) -> None:
        with pytest.raises(
            ConfigError, match=r"SGD's own step\(\), but this optimizer's step\(\) was"
        ):
            Rank(c, notified(False, (1,), kind=make_sharded), None, make_optimizer=make)

    run_ranks(1, work)


def test_the_state_of_a_parameter_with_gaps_in_its_memory_is_gathered_in_its_order() -> None:
    gradient = torch.arange(24.0).view(4, 6)

    def work(c: Communicator) -> Any:
        model = nn.Module()
        model.weight = nn.Parameter(torch.zeros(6, 8)[:, ::2].t())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        replica = replicate(model, optimizer, c, 10**6, kind)
        with replica_step(replica, 0, 0.5):
            (model.weight * gradient).sum().backward()
            optimizer.step()
        state = replica.state()
        c.all_reduce(torch.zeros(1)).wait("the end of all ranks")
        replica.close()
        return state

    kind = notified(False, (1, 1), kind=make_sharded)
    entries = run_ranks(2, work)[0]["optimizer"]["state"][0]
    assert torch.equal(entries["momentum_buffer"], gradient)
