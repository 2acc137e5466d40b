"""What lossy wires have yet to send outlives a checkpoint, another world, and a frozen layer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from paceline.algorithms.allreduce import make_allreduce
from paceline.comm.communicator import Communicator
from paceline.config.world import SyncConfig
from paceline.errors import ConfigError
from paceline.replica.replica import Replica
from paceline.session.resume.start import Start
from paceline.wiring import exchange as table
from tests.harness.equivalence.exchange_state import (
    MODEL,
    Rank,
    State,
    missed,
    same,
    totals,
    train,
    with_ranks,
)
from tests.harness.equivalence.large_batch import replicate
from tests.harness.equivalence.put_synchronizers import MakeIntraMachine, in_threads, notified
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.steps_by_hand import replica_step
from tests.harness.processes.worlds import run_of, world_of

MACHINES = [(1, 1), (1, 1, 1), (2, 1), (2, 2)]


def named(value: object) -> str:
    """Name a case, the same in every process."""
    return "near" if value is in_threads else str(value)


@pytest.mark.parametrize(
    ("machines", "intra_machine"),
    [*((machines, None) for machines in MACHINES), ((2, 1), in_threads), ((1, 2), in_threads)],
    ids=named,
)
@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_a_run_goes_on_with_the_bits_of_one_that_never_stopped(
    machines: tuple[int, ...], intra_machine: MakeIntraMachine | None, wire: str
) -> None:
    whole = train(machines, wire, range(6), intra_machine=intra_machine)
    half = train(machines, wire, range(3), intra_machine=intra_machine)
    assert all(bool(value.any()) for value in totals(half).values()), "nothing was missed"
    assert same(train(machines, wire, range(3, 6), half, intra_machine=intra_machine), whole)


def test_what_was_missed_has_the_parameters_names_and_shapes() -> None:
    state = train((2, 1), "int8", range(2))
    assert len(missed(state)) == 2
    for group in missed(state):
        assert {name: value.shape for name, value in group.items()} == {
            name: value.shape for name, value in MODEL.state_dict().items()
        }


@pytest.mark.parametrize(
    ("machines", "bucket_bytes", "intra_machine"),
    [((1, 1), 10**9, None), ((2, 2), 2_000, None), ((2, 3), 2_000, in_threads)],
    ids=named,
)
def test_other_buckets_and_more_ranks_a_machine_keep_each_machines_part(
    machines: tuple[int, ...], bucket_bytes: int, intra_machine: MakeIntraMachine | None
) -> None:
    state = train((1, 1), "int8", range(3))
    again = train(
        machines, "int8", range(0), state, bucket_bytes=bucket_bytes, intra_machine=intra_machine
    )
    assert same(again["exchange"], state["exchange"])


@pytest.mark.parametrize("machines", [(1, 1, 1), (2, 1, 1), (1,) * 5], ids=str)
def test_another_number_of_machines_deals_the_sum_out_to_the_owners(
    machines: tuple[int, ...],
) -> None:
    state = train((1, 1), "int8", range(3))
    again = train(machines, "int8", range(0), state)
    assert same(totals(again), totals(state))
    for name in totals(again):
        having = torch.stack([group[name] != 0 for group in missed(again)]).sum(0)
        assert int(having.max()) == 1
    owned = [any(bool(value.any()) for value in group.values()) for group in missed(again)]
    assert all(owned)


def test_a_step_without_an_update_leaves_what_was_missed() -> None:
    def work(rank: Rank) -> None:
        rank.train(0)
        before = rank.state()
        with replica_step(rank.replica, 1, 0.5):
            rank.backward(1)
            rank.optimizer.zero_grad()
        assert same(rank.state(), before)
        rank.train(2)
        assert not same(rank.state()["exchange"], before["exchange"]) or rank.communicator.rank

    with_ranks(work)


def test_freezing_a_layer_leaves_what_was_missed_of_the_others() -> None:
    def work(rank: Rank) -> None:
        rank.train(0)
        before = rank.state()["exchange"]
        frozen = next(rank.model.parameters())
        frozen.requires_grad_(False)
        with replica_step(rank.replica, 1, 0.5):
            rank.backward(1)
            rank.optimizer.zero_grad()
        after = rank.state()["exchange"]
        if rank.communicator.rank == 0:
            for old, new in zip(before["missed"], after["missed"], strict=True):
                assert same(new, {name: value for name, value in old.items() if name in new})
                assert old.keys() - new.keys() == {"0.weight"}

    with_ranks(work)


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_what_was_missed_follows_the_scale_of_the_loss(wire: str) -> None:
    """All scales are powers of two, which change no bit of a gradient but its exponent."""
    states: dict[bool, State] = {}

    def trained(scaled: bool) -> Any:
        def work(rank: Rank) -> None:
            scaler = torch.amp.GradScaler(
                "cpu", init_scale=2.0**5, growth_interval=1, enabled=scaled
            )
            rank.replica.use_loss_scale(scaler)
            for number in range(5):
                rank.train(number, scaler)
            if rank.communicator.rank == 0:
                states[scaled] = {"model": rank.model.state_dict()}

        return work

    for scaled in (False, True):
        with_ranks(trained(scaled), wire)
    assert same(states[True], states[False])


def test_a_scaler_that_nobody_follows_is_refused() -> None:
    def work(rank: Rank) -> None:
        scaler = torch.amp.GradScaler("cpu")
        with pytest.raises(ConfigError, match=r"world\.track\(scaler\)"):
            rank.train(0, scaler)

    with_ranks(work)


def test_a_start_gives_it_to_a_lossy_wire_and_says_that_others_drop_it() -> None:
    state = train((1, 1), "int8", range(2))
    start = Start(state=state)
    plain_start = Start(state={"model": {}})

    def work(c: Communicator, kind: Any) -> tuple[Any, ...]:
        rank = Rank(c, kind, None, 2_000)
        assert plain_start.restore_exchange(rank.replica) == ()
        notes = start.restore_exchange(rank.replica)
        exchange = rank.replica.state()
        rank.close()
        return notes, exchange

    lossy, plain = notified(False, (1, 1), "bf16"), notified(False, (1, 1))
    notes, exchange = run_ranks(2, lambda c: work(c, lossy))[0]
    assert notes == ()
    assert same(dict(exchange), state["exchange"])
    for kind in (plain, make_allreduce):
        notes, exchange = run_ranks(2, lambda c, kind=kind: work(c, kind))[0]
        assert exchange is None
        assert "are dropped" in notes[0]


def test_a_lossy_exchange_resumes_with_the_bucket_size_that_its_checkpoint_records() -> None:
    def state(c: Communicator, start: Start) -> Any:
        config = start.keep_bucket_size(SyncConfig(sync="notified", wire="int8"))
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = run_of(c, world_of((1, 1), c.rank))
        replica = table.replicate(model, optimizer, run, config)
        found = replica.state()
        c.all_reduce(torch.zeros(1)).wait("the end of all ranks")
        replica.close()
        return found

    def recorded(start: Start) -> float:
        return float(run_ranks(2, lambda c: state(c, start))[0]["bucket_mb"])

    exchange = {"scale": 1.0, "missed": []}
    assert recorded(Start()) == 8
    assert recorded(Start(state={"exchange": {**exchange, "bucket_mb": 2.0}})) == 2
    assert recorded(Start(state={"exchange": exchange})) == 16  # of before it was recorded


@pytest.mark.parametrize(
    "config",
    [
        SyncConfig(sync="notified"),
        SyncConfig(sync="auto", wire="int8"),
        SyncConfig(sync="notified", wire="int8", bucket_mb=3),
    ],
    ids=["exact", "measured", "given"],
)
def test_a_recorded_bucket_size_is_for_lossy_exchanges_whose_size_is_not_given(
    config: SyncConfig,
) -> None:
    start = Start(state={"exchange": {"scale": 1.0, "missed": [], "bucket_mb": 2.0}})
    assert start.keep_bucket_size(config) is config


def test_gradients_as_they_are_have_no_state() -> None:
    def work(c: Communicator) -> tuple[Any, bool]:
        model: nn.Module = copy.deepcopy(MODEL)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica: Replica = replicate(model, optimizer, c, 2_000, kind)
        applied = replica.state(), replica.restore({"scale": 1.0, "missed": []})
        c.all_reduce(torch.zeros(1)).wait("the end of all ranks")
        replica.close()
        return applied

    for wire, machines in (("fp32", (1, 1)), ("int8", (2,))):  # none goes between machines there
        kind = notified(False, machines, wire)
        assert run_ranks(2, work) == [(None, False)] * 2
