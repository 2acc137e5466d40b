"""Averaging through a server equals averaging among the workers; ranks and server are threads."""

from __future__ import annotations

from threading import Barrier
from typing import Any

import pytest
import torch
from torch import nn

from paceline.algorithms.synchronizer import Weights
from paceline.comm.communicator import Communicator
from paceline.errors import PeerLost
from paceline.update.outer.average import Average
from paceline.update.outer.diloco import DiLoCo
from tests.harness.equivalence.averaging import (
    State,
    Task,
    Worker,
    cuts,
    on_ranks,
)
from tests.harness.equivalence.put_synchronizers import ServerThread
from tests.harness.twins.faulty_window import Faults

ROUNDS: list[dict[str, Any]] = [
    {"every": 1},
    {"every": 3, "momenta": "average"},
    {"every": 6, "fragments": 2, "delay": 2, "outer": DiLoCo()},
    {"every": ((0, 1), (5, 4)), "fragments": 3, "outer": "easgd", "delay": 0},
]


def train(worker: Worker, _: Communicator) -> tuple[State, State]:
    worker.train(range(len(worker.task.cuts)))
    worker.replica.settle(Weights.MERGED)
    return worker.merged(), worker.own()


def require_same_bits(task: Task, server: ServerThread, *, faults: bool = False) -> None:
    """Train with the server and without; require the same bits."""
    with_server = on_ranks(task, train, server, faults=faults)
    assert server.error is None
    for served, among in zip(with_server, on_ranks(task, train), strict=True):
        for found, expected in zip(served, among, strict=True):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("rounds", "workers"),
    [(ROUNDS[1], 1), (ROUNDS[0], 2), *((r, 3) for r in ROUNDS), (ROUNDS[2], 4)],
)
def test_merges_through_a_server_have_the_bits_of_those_among_the_workers(
    rounds: dict[str, Any], workers: int
) -> None:
    task = Task(average=Average(**rounds), cuts=cuts(20, workers, seed=workers))
    server = ServerThread()
    require_same_bits(task, server)
    assert server.server is not None
    assert min(server.server.versions) >= 3
    assert server.server.nbytes > 0


@pytest.mark.parametrize("machines", [(2, 1), (2, 2), (3,)])
def test_a_machines_workers_sum_before_the_server_does(machines: tuple[int, ...]) -> None:
    workers = sum(machines)
    task = Task(average=Average(every=3), cuts=cuts(20, workers, seed=9), machines=machines)
    require_same_bits(task, ServerThread())


def test_puts_that_are_late_and_overtake_each_other_change_no_bit() -> None:
    average = Average(every=4, fragments=2, delay=1, outer="diloco")
    task = Task(average=average, cuts=cuts(20, 3, seed=6))
    require_same_bits(task, ServerThread(Faults(seed=5)), faults=True)


def net32() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 4))


@pytest.mark.parametrize("machines", [(1,), (1, 1, 1), (2, 1)])
@pytest.mark.parametrize("wire", ["bf16", "int8", "int4", "topk:0.1:4"])
def test_a_lossy_wire_to_the_server_follows_the_exact_merges(
    wire: str, machines: tuple[int, ...]
) -> None:
    def task(wire: str) -> Task:
        return Task(
            average=Average(every=2, fragments=2),
            cuts=cuts(24, sum(machines), seed=2),
            make_model=net32,
            make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.3),
            machines=machines,
            wire=wire,
            dtype=torch.float32,
        )

    exact = on_ranks(task("fp32"), train)
    results = on_ranks(task(wire), train, ServerThread())
    near = 0.3 if wire.startswith("topk") else 0.05 if wire == "int4" else 0.02
    for (merged, _), (expected, _) in zip(results, exact, strict=True):
        for name, value in merged.items():
            assert torch.equal(value, results[0][0][name])
            torch.testing.assert_close(value, expected[name], rtol=0, atol=near)
    assert any(not torch.equal(v, exact[0][0][name]) for name, v in results[0][0].items())


@pytest.mark.parametrize("wire", ["fp32", "int8"])
@pytest.mark.parametrize("served", [(True, False), (False, True), (True, True)], ids=str)
def test_a_resume_may_change_between_workers_and_server(
    served: tuple[bool, bool], wire: str
) -> None:
    saved: list[Any] = []
    average = Average(every=6, fragments=2, delay=2, outer="diloco")
    dtype = torch.float32 if wire == "int8" else torch.float64
    task = Task(
        average=average,
        cuts=cuts(20, 2),
        make_model=lambda: net32().to(dtype),
        make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5),
        wire=wire,
        dtype=dtype,
    )

    def before(worker: Worker, _: Communicator) -> None:
        worker.train(range(8))
        if (state := worker.replica.state()) is not None:
            saved.append(state)

    def after(worker: Worker, _: Communicator) -> tuple[State, State]:
        assert worker.replica.restore(saved[0])
        worker.train(range(8, 20))
        worker.replica.settle(Weights.MERGED)
        return worker.merged(), worker.own()

    on_ranks(task, before, ServerThread() if served[0] else None)
    resumed = on_ranks(task, after, ServerThread() if served[1] else None)
    straight = on_ranks(task, train, ServerThread() if served[1] else None)
    same_bits = wire == "fp32" or served == (True, True)
    for one, other in zip(resumed, straight, strict=True):
        for found, expected in zip(one, other, strict=True):
            for name, value in found.items():
                if same_bits:
                    assert torch.equal(value, expected[name])
                else:
                    torch.testing.assert_close(value, expected[name], rtol=0, atol=0.02)


@pytest.mark.parametrize("machines", [(1, 1), (2,)])
def test_the_loss_of_the_server_names_it_on_every_worker(machines: tuple[int, ...]) -> None:
    server = ServerThread()
    sentences: list[str] = []
    both_know = Barrier(2, timeout=60)

    def lose(worker: Worker, communicator: Communicator) -> None:
        try:
            for step in range(20):
                worker.train(range(step, step + 1))
                if step == 4 and communicator.rank == 0:
                    assert server.server is not None
                    server.server.close()
        except PeerLost as error:
            sentences.append(str(error))
        both_know.wait()  # a rank that ends is lost, too

    task = Task(average=Average(every=3), cuts=cuts(20, 2), machines=machines)
    on_ranks(task, lose, server)
    assert len(sentences) == 2
    for sentence in sentences:
        assert "lost the averaging server in " in sentence


def test_a_lost_worker_ends_the_server_with_its_name() -> None:
    server = ServerThread()

    def leave(worker: Worker, communicator: Communicator) -> None:
        if communicator.rank == 1:
            worker.train(range(3))
            worker.replica.close()
            return
        with pytest.raises(PeerLost, match="lost rank 1"):
            worker.train(range(20))
        server.join()  # a rank that ends is lost, too

    on_ranks(Task(average=Average(every=3), cuts=cuts(20, 2)), leave, server)
    assert isinstance(server.error, PeerLost)
    assert server.error.peer == 1
    assert "rank 2 lost rank 1 in a merge" in str(server.error)
