"""Sums of a machine by collectives: in any order of sending and waiting, and never a hang."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from threading import Barrier

import pytest
import torch
from torch import Tensor

from paceline.comm.communicator import Communicator
from paceline.comm.peer_activities import Timeout
from paceline.errors import CommTimeout
from paceline.reduce import machine_sums
from paceline.reduce.machine_sums import MachineSums
from paceline.reduce.put_engine.layout import BucketSpec, Topology, lay_out
from paceline.reduce.put_engine.put_exchange import PutExchange
from tests.harness.equivalence.put_synchronizers import in_threads
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.twins.window import WindowGroup

RUNS = ((700, 3), (5000,), (1, 2, 4), (9,))  # parameters' sizes; the last one is the statistics'
BUCKETS, STEPS = 3, 5
Values = list[Tensor | None]


def exchange_of(
    machines: tuple[int, ...], limit: float = 30.0, near_limit: float = 30.0
) -> Callable[[int], MachineSums]:
    """Return what makes each rank's exchange, with limits."""
    topology, intra_machine = Topology.of(machines), in_threads(machines, near_limit)
    specs = [BucketSpec(lengths=lengths, dtype=torch.float64) for lengths in RUNS]
    layout = lay_out(specs, topology.leaders)
    windows = WindowGroup(sum(machines), layout.size, layout.notifications)
    templates = [[torch.zeros(n, dtype=torch.float64) for n in lengths] for lengths in RUNS]
    names = [[str(n) for n in lengths] for lengths in RUNS]
    timeout = Timeout(limit, limit)

    def make(rank: int) -> MachineSums:
        ranks = topology.groups[topology.group_of(rank)]
        own = windows.window(rank)
        return MachineSums(
            ranks,
            intra_machine(rank),
            lambda sent: PutExchange(own, layout, sent, names, timeout),
            templates,
            names,
            BUCKETS,
            timeout,
        )

    return make


def values_of(rank: int, step: int, run: int) -> Values:
    """Make up a rank's gradients; most of the ranks don't use a parameter now and then."""
    random = Random(1000 * step + 10 * rank + run)
    numbers = torch.Generator().manual_seed(random.randrange(10**6))
    return [
        torch.randn(n, dtype=torch.float64, generator=numbers)
        if run == BUCKETS or random.random() < 0.4
        else None
        for n in RUNS[run]
    ]


def sums_of(world_size: int, step: int, run: int) -> Values:
    """Add up what all ranks have, as an independent reference."""
    sums: Values = []
    for place in range(len(RUNS[run])):
        parts = [(rank, values_of(rank, step, run)[place]) for rank in range(world_size)]
        there = [
            (rank + 1) / 10 * contribution
            for rank, contribution in parts
            if contribution is not None
        ]
        sums.append(torch.stack(there).sum(0) if there else None)
    return sums


@pytest.mark.parametrize("machines", [(2, 1), (2, 2), (1, 3), (3, 2, 1)], ids=str)
def test_ranks_send_and_wait_each_in_its_own_order(machines: tuple[int, ...]) -> None:
    make, world_size = exchange_of(machines), sum(machines)

    def work(communicator: Communicator) -> dict[tuple[int, int], Values]:
        rank, got = communicator.rank, {}
        exchange, random = make(rank), Random(rank)
        for step in range(STEPS):
            exchange.begin(1.0)
            for run in random.sample(range(len(RUNS)), len(RUNS)):
                values = values_of(rank, step, run)
                assert exchange.send(run, values, (rank + 1) / 10, "a test") == step + 1
            for run in random.sample(range(len(RUNS)), len(RUNS)):
                sums = exchange.wait(run, step + 1)
                got[step, run] = [None if s is None else s.clone() for s in sums]
        exchange.drain()
        exchange.close()
        return got

    first, *others = run_ranks(world_size, work)
    for (step, run), sums in first.items():
        for one, expected in zip(sums, sums_of(world_size, step, run), strict=True):
            assert (one is None) == (expected is None)
            if one is not None and expected is not None:
                torch.testing.assert_close(one, expected, rtol=0, atol=1e-12)
        for other in others:
            assert all(same(a, b) for a, b in zip(sums, other[step, run], strict=True))


def same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def test_only_a_leader_sends_to_another_machine() -> None:
    make = exchange_of((3, 1))

    def work(communicator: Communicator) -> tuple[int, int]:
        exchange = make(communicator.rank)
        exchange.close()
        return exchange.traffic[1]

    leader, *others, alone = run_ranks(4, work)
    bytes_of_values = RUNS[1][0] * 8  # half of them go each way twice
    assert leader == alone == (bytes_of_values + 64, bytes_of_values + 64)
    assert others == [(0, 0), (0, 0)]


def waited_in_vain(make: Callable[[int], MachineSums], silent: int) -> list[str]:
    """Let one rank of three send nothing; return what ends the others' waits."""
    over = Barrier(3)

    def work(communicator: Communicator) -> str:
        exchange, said = make(communicator.rank), ""
        if communicator.rank != silent:
            exchange.begin(1.0)
            for run in range(len(RUNS)):
                values = values_of(communicator.rank, 0, run)
                exchange.send(run, values, 1.0, f"bucket {run} in step 7")
            with pytest.raises(CommTimeout) as caught:
                exchange.wait(0, 1)
            said = str(caught.value)
        over.wait()
        exchange.close()
        return said

    return run_ranks(3, work)


def test_a_silent_neighbour_is_named() -> None:
    said = waited_in_vain(exchange_of((2, 1), limit=1.0, near_limit=1.0), silent=1)
    assert said[0].startswith("rank 0 waited 1 s for rank 1 in bucket 3 in step 7: it hangs, or")
    assert said[2].startswith("rank 2 waited 1 s for rank 0 in bucket 3 in step 7: it hangs, ")


def test_a_silent_machine_is_named_by_the_leader() -> None:
    said = waited_in_vain(exchange_of((2, 1), limit=1.0, near_limit=1.0), silent=2)
    assert said[0].startswith("rank 0 waited 1 s for rank 2 in bucket 3 in step 7: it hangs, ")
    assert said[1].startswith("rank 1 waited 1 s for rank 0 in bucket 3 in step 7: it hangs, or")


def test_a_device_that_hangs_ends_the_wait_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its collective neither ends nor fails, as on a GPU."""
    monkeypatch.setattr(machine_sums, "_GRACE_S", 0.0)
    said = waited_in_vain(exchange_of((2, 1), limit=1.0, near_limit=1000.0), silent=1)
    sentence = "rank 0 waited 1 s for the sum of its machine in bucket 0 in step 7: its device"
    assert said[0].startswith(sentence)
