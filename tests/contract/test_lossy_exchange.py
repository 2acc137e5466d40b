"""Lossy wires between owners: equal everywhere, never adrift, and without a trace if taken back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.codecs.codecs import CODECS
from paceline.comm.peer_activities import Timeout
from paceline.reduce.put_engine import owner
from paceline.reduce.put_engine.layout import BucketSpec, Topology, lay_out
from paceline.reduce.put_engine.put_exchange import PutExchange
from tests.harness.equivalence.put_synchronizers import LIMIT
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.twins.window import WindowGroup

LENGTHS = (700, 3, 1, 5000)
NUMEL = sum(LENGTHS)

MACHINES = [(1, 1), (1, 1, 1), (2, 1), (2, 2)]


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an owner that isn't told go on sleeping, rather than look by itself now and then."""
    monkeypatch.setattr(owner, "_WAIT_SLICE_S", 1000.0)


def maker(machines: tuple[int, ...], codec: str) -> Callable[[int], PutExchange]:
    """Return what makes the exchange of each rank, for one run of some parameters."""
    world_size = sum(machines)
    spec = BucketSpec(lengths=LENGTHS, dtype=torch.float32, codec=CODECS[codec])
    layout = lay_out([spec], Topology.of(machines))
    group = WindowGroup(world_size, layout.size, layout.notifications, machines)
    templates, names = [[torch.zeros(n) for n in LENGTHS]], [[str(n) for n in LENGTHS]]
    return lambda rank: PutExchange(
        group.window(rank), layout, templates, names, Timeout(LIMIT, LIMIT)
    )


def gradients(rank: int, step: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(n, generator=random) * 10 ** (rank - 1) for n in LENGTHS]


def sums(exchange: PutExchange, rank: int, step: int, weight: float) -> Tensor:
    """Exchange a step; return the sums, (values,)."""
    exchange.begin(1.0)
    version = exchange.send(0, gradients(rank, step), weight, "a test")
    got = exchange.wait(0, version)
    return torch.cat([value for value in got if value is not None]).clone()


def weight_of(rank: int) -> float:
    return (rank + 1) / 10


def true_sum(world_size: int, step: int) -> Tensor:
    parts = [weight_of(r) * torch.cat(gradients(r, step)).double() for r in range(world_size)]
    return torch.stack(parts).sum(0)


@pytest.mark.parametrize("machines", MACHINES, ids=str)
@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_ranks_get_the_same_and_errors_do_not_add_up(machines: tuple[int, ...], codec: str) -> None:
    world_size, steps = sum(machines), 30
    make = maker(machines, codec)

    def train(rank: int) -> list[Tensor]:
        exchange = make(rank)
        got = [sums(exchange, rank, step, weight_of(rank)) for step in range(steps)]
        exchange.drain()
        exchange.close()
        return got

    first, *others = run_ranks(world_size, lambda c: train(c.rank))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    errors, drift, all_errors = [], torch.zeros(NUMEL, dtype=torch.float64), 0.0
    for step, got in enumerate(first):
        error = got.double() - true_sum(world_size, step)
        errors.append(float(error.abs().max()))
        drift += error
        all_errors += float(error.abs().mean())
    assert min(errors) > 0, "nothing was coded"
    assert drift.abs().max() < 3 * max(errors)
    assert drift.abs().mean() < all_errors / 5, "errors add up"


@pytest.mark.parametrize("machines", [(1, 1, 1), (2, 1)], ids=str)
@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_a_step_that_is_taken_back_leaves_no_trace(machines: tuple[int, ...], codec: str) -> None:
    def train(make: Callable[[int], PutExchange], rank: int, taken_back: bool) -> list[Tensor]:
        exchange = make(rank)
        got = [sums(exchange, rank, 0, weight_of(rank)), sums(exchange, rank, 1, weight_of(rank))]
        if taken_back:
            sums(exchange, rank, 7, weight_of(rank))
            exchange.abandon(0, None)
        got.append(sums(exchange, rank, 2, weight_of(rank)))
        exchange.drain()
        exchange.close()
        return got

    plain, with_one = (
        run_ranks(sum(machines), lambda c, m=make, b=back: train(m, c.rank, b))
        for make, back in ((maker(machines, codec), False), (maker(machines, codec), True))
    )
    assert all(torch.equal(a, b) for a, b in zip(plain[0], with_one[0], strict=True))


@pytest.mark.parametrize("machines", MACHINES, ids=str)
def test_a_parameter_that_nobody_used_has_no_sum(machines: tuple[int, ...]) -> None:
    make = maker(machines, "int8")

    def train(rank: int) -> list[list[bool]]:
        exchange, used = make(rank), []
        for step in range(3):
            values: list[Tensor | None] = list(gradients(rank, step))
            values[0] = None
            values[1] = values[1] if rank == 1 else None
            exchange.begin(1.0)
            version = exchange.send(0, values, 0.5, "a test")
            used.append([value is not None for value in exchange.wait(0, version)])
        exchange.drain()
        exchange.close()
        return used

    for got in run_ranks(sum(machines), lambda c: train(c.rank)):
        assert got == [[False, True, True, True]] * 3
