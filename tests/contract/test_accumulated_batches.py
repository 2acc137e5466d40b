"""Gradients that accumulate over several batches: buffers, and what a snapshot has of them.

A forward before the step changes BatchNorm's running statistics, which the ranks average.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.cluster.membership.snapshot_name import SnapshotName
from paceline.comm.communicator import Communicator
from paceline.replica.state_parts import BUFFERS
from paceline.snapshots.copier import StateCopier
from paceline.snapshots.objects import StateObjects
from paceline.snapshots.store import SnapshotStore
from tests.harness.equivalence.case_models import normalised
from tests.harness.equivalence.one_rank import Bench
from tests.harness.equivalence.put_synchronizers import notified
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.steps_by_hand import replica_step


def buffers(bench: Bench) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in bench.model.named_buffers()}


def accumulate(bench: Bench, number: int, *, inside: bool) -> None:
    """Train two batches in one step, the first of them before the step or inside it."""
    first, second = number % 4, (number + 1) % 4
    bench.replica.begin_batch()
    if not inside:
        with bench.replica.no_sync():
            bench.backward(first)
        bench.replica.begin_batch()
    with replica_step(bench.replica, number, 1 / bench.communicator.world_size):
        if inside:
            with bench.replica.no_sync():
                bench.backward(first)
        bench.backward(second)
        bench.optimizer.step()
        bench.optimizer.zero_grad()


@pytest.mark.parametrize("put", [False, True], ids=["allreduce", "notified"])
def test_a_forward_before_the_step_counts_in_the_running_statistics(put: bool) -> None:
    torch.manual_seed(1)
    model = normalised()

    def run(*, inside: bool) -> list[tuple[list[Tensor], dict[str, Tensor]]]:
        more: dict[str, Any] = {"kind": notified(True, (1, 1))} if put else {}
        return run_ranks(2, lambda c: work(Bench.of(c, model, **more), inside=inside))

    def work(bench: Bench, *, inside: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
        for number in range(3):
            accumulate(bench, number, inside=inside)
        bench.replica.settle()
        bench.replica.drain()
        bench.replica.close()
        return bench.weights(), buffers(bench)

    pairs = zip(run(inside=False), run(inside=True), strict=True)
    for (weights, found), (other_weights, expected) in pairs:
        assert all(map(torch.equal, weights, other_weights))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("put", [False, True], ids=["allreduce", "notified"])
def test_statistics_of_a_step_with_two_exchanges_have_both_forwards(put: bool) -> None:
    torch.manual_seed(1)
    model = normalised().double()

    def work(c: Communicator, bench: Bench, *, looks: bool) -> dict[str, Tensor]:
        for number in range(2):
            with replica_step(bench.replica, number, 0.5):
                if looks:
                    bench.backward(number)
                    assert next(bench.model.parameters()).grad is not None
                else:
                    with bench.replica.no_sync():
                        bench.backward(number)
                bench.backward(number + 1)
                bench.optimizer.step()
                bench.optimizer.zero_grad()
        bench.replica.settle()
        bench.replica.drain()
        bench.replica.close()
        return buffers(bench)

    def run(*, looks: bool) -> list[dict[str, Tensor]]:
        more: dict[str, Any] = {"kind": notified(True, (1, 1))} if put else {}
        return run_ranks(2, lambda c: work(c, Bench.of(c, model, **more), looks=looks))

    for found, expected in zip(run(looks=True), run(looks=False), strict=True):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("moment", ["in the step", "between steps"])
def test_a_snapshot_has_the_buffers_from_before_the_first_batch(moment: str) -> None:
    torch.manual_seed(1)
    model = normalised()

    def work(c: Communicator) -> tuple[dict[str, Tensor], ...]:
        bench, snapshots, name = Bench.of(c, model), SnapshotStore(), SnapshotName("token", 1)
        objects = StateObjects(model=bench.model, optimizer=bench.optimizer)
        accumulate(bench, 0, inside=False)
        bench.replica.settle()
        expected = buffers(bench)
        bench.replica.begin_batch()
        with bench.replica.no_sync():
            bench.backward(1)
        changed = buffers(bench)
        copier = StateCopier(snapshots, name, objects, {})
        if moment == "between steps":
            bench.replica.copy_now(copier)
        else:
            bench.replica.copy_in_step(copier)
        with replica_step(bench.replica, 1, 0.5):
            bench.backward(2)
            bench.optimizer.step()
        return expected, changed, dict(snapshots.state(name)[BUFFERS])

    for expected, changed, found in run_ranks(2, work):
        assert any(not torch.equal(changed[name], expected[name]) for name in expected)
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


def test_buffers_are_copied_for_a_batch_that_trains_and_only_once() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.BatchNorm1d(8))
    x = torch.randn(4, 192)

    def work(c: Communicator) -> None:
        bench = Bench.of(c, model)
        earlier = bench.replica._earlier
        bench.model(x)
        assert earlier.values is None  # no batch has begun
        bench.replica.begin_batch()
        with torch.no_grad():
            bench.model.eval()(x)
        assert earlier.values is None  # nothing is trained
        expected = buffers(bench)
        bench.model.train()(x)
        bench.replica.begin_batch()
        bench.model(x)
        assert earlier.values is not None
        for name, value in expected.items():
            copied = earlier.values[name]
            assert copied is not None
            assert torch.equal(copied, value)
        with replica_step(bench.replica, 0, 1.0):
            bench.model(x).sum().backward()
            bench.optimizer.step()
        assert earlier.values is None

    run_ranks(1, work)
