"""The exchange of rows, over ranks that are threads and real processes on Gloo."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.comm.communicator import Communicator
from paceline.errors import CommError, PeerLost
from paceline.reduce.row_exchange import RowExchange
from paceline.timeline.timeline import Timeline
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.processes.gloo_processes import spawn
from tests.harness.twins.communicator import ThreadGroup

Run = Callable[..., list[Any]]
ROWS, WIDTH = 40, 3
# Of each step, how many rows each rank has; None: no gradient. Messages overflow in steps 0, 1, 4.
COUNTS: list[list[int | None]] = [[2, 3, 1], [9, 0, 4], [9, 9, 9], [None, 1, 2], [5, 30, None]]


@pytest.fixture(params=[run_ranks, spawn], ids=["threads", "gloo"])
def run(request: pytest.FixtureRequest) -> Run:
    return request.param


class Counts(Timeline):
    """Adds up counts."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, float] = {"sent": 0, "received": 0}

    def count(self, name: str, amount: float) -> None:
        self.counts[name] += amount


def gradient(step: int, rank: int, table: int) -> Tensor | None:
    """Make a rank's gradient of a step, in float32, with rows that are there twice."""
    count = COUNTS[step][(rank + table) % 3]
    if count is None:
        return None
    random = torch.Generator().manual_seed(100 * step + 10 * rank + table)
    indices = torch.randint(0, ROWS, (count,), generator=random)
    values = torch.randn(count, WIDTH, generator=random)
    return torch.sparse_coo_tensor(indices[None], values, (ROWS, WIDTH), check_invariants=True)


def tables() -> list[Tensor]:
    return [torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)]


def trained(c: Communicator) -> list[list[Tensor | None]]:
    """Exchange two tables in each step, on odd ranks the second one first."""
    exchange = RowExchange(tables(), c)
    found: list[list[Tensor | None]] = []
    for step in range(len(COUNTS)):
        exchange.begin(1.0)
        versions = {}
        for table in (1, 0) if c.rank % 2 else (0, 1):
            own = [gradient(step, c.rank, table)]
            versions[table] = exchange.send(table, own, 1 / c.world_size, f"table {table}")
        assert set(versions.values()) == {step + 1}
        sums = [exchange.wait(table, versions[table])[0] for table in (0, 1)]
        found.append([None if total is None else total.clone() for total in sums])
    exchange.close()
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_ranks_get_the_same_bits_of_the_mean(run: Run, world_size: int) -> None:
    ranks = run(world_size, trained)
    for step, sums in enumerate(ranks[0]):
        for table, total in enumerate(sums):
            own = [gradient(step, rank, table) for rank in range(world_size)]
            there = [g for g in own if g is not None]
            for other in (rank[step][table] for rank in ranks):
                assert (other is None) == (not there)
                if other is not None and total is not None:
                    expected = torch.stack([g.to_dense() for g in there]).sum(0) / world_size
                    assert torch.allclose(other.to_dense(), expected, atol=1e-6)
                    used = {int(row) for g in there for row in g._indices()[0]}
                    assert set(other.indices()[0].tolist()) == used
                    assert torch.equal(other.values(), total.values())


def traffic(c: Communicator) -> dict[str, float]:
    timeline = Counts()
    exchange = RowExchange([torch.zeros(1000, 8)], c, timeline)
    for step, count in enumerate((10, 10, 20)):
        exchange.begin(1.0)
        own = torch.sparse_coo_tensor(
            torch.arange(count)[None], torch.ones(count, 8), (1000, 8), check_invariants=True
        )
        exchange.wait(0, exchange.send(0, [own], 1.0, f"step {step}"))
    exchange.close()
    return timeline.counts


def test_rows_travel_and_the_table_does_not(run: Run) -> None:
    header, row = 16, 8 + 8 * 4
    # Steps: a header and the 10 rows behind it; 10 rows at once; 10 at once and 10 behind them.
    sent = 2 * sum(header + row * rows for rows in (0, 10, 10, 10, 10))
    assert run(3, traffic) == [{"sent": sent, "received": sent}] * 3


def loses_a_peer(c: Communicator) -> str:
    exchange = RowExchange(tables(), c)
    exchange.begin(1.0)
    if c.rank == 1:
        c.abort()
        exchange.close()
        return ""
    versions = [exchange.send(i, [None], 1.0, f"table {i} in step 7") for i in (0, 1)]
    errors = []
    for index, version in enumerate(versions):
        try:
            exchange.wait(index, version)
        except CommError as error:
            errors.append(str(error))
    exchange.close()
    assert len(errors) == 2
    return errors[0]


def test_a_lost_peer_is_an_error_of_all_that_is_under_way(run: Run) -> None:
    assert "all_gather of table 0 in step 7" in run(2, loses_a_peer)[0]


def test_closing_while_rows_are_under_way_ends_the_thread() -> None:
    group, others = ThreadGroup(2), set(threading.enumerate())
    exchange = RowExchange(tables(), group.communicator(0))
    exchange.begin(1.0)
    exchange.send(0, [None], 1.0, "table 0")
    exchange.close()  # rank 1 never comes
    assert not set(threading.enumerate()) - others
    with pytest.raises(PeerLost):
        group.communicator(1).all_reduce(torch.ones(1)).wait("what follows")


def test_closing_with_nothing_under_way_leaves_the_connections_open() -> None:
    def on_rank(c: Communicator) -> float:
        exchange = RowExchange(tables(), c)
        exchange.begin(1.0)
        for index in (0, 1):
            exchange.abandon(index, exchange.send(index, [None], 1.0, "a table"))
        exchange.close()
        c.all_reduce(one := torch.ones(1)).wait("another exchange")
        return float(one)

    assert run_ranks(2, on_rank) == [2.0, 2.0]
