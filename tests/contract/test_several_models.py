"""Replicas of several models: what each sends and when, and the running statistics of all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.algorithms.allreduce import make_allreduce
from paceline.algorithms.method import Method
from paceline.cluster.membership.snapshot_name import SnapshotName
from paceline.comm.communicator import Communicator, Ticket
from paceline.errors import ConfigError
from paceline.reduce.buckets import Bucket
from paceline.replica.checksums import ChecksumParts
from paceline.replica.group import ReplicaGroup
from paceline.replica.grouped_replica import GroupedReplica
from paceline.replica.trained_parameters import Scope
from paceline.snapshots.copier import StateCopier
from paceline.snapshots.objects import StateObjects
from paceline.update.batch_norm import BatchShare, RunningStatistics
from paceline.update.updater import make_updater
from tests.harness.equivalence.given_builder import GivenBuilder
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.steps_by_hand import replica_step
from tests.harness.processes.worlds import run_of
from tests.harness.twins.communicator import ThreadCommunicator, ThreadGroup

LIMIT = 20.0


class Counting(ThreadCommunicator):
    """Communicator that counts its all-reduces."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        super().__init__(group, rank)
        self.count = 0

    def all_reduce(self, tensor: Tensor) -> Ticket:
        """Count, and start."""
        self.count += 1
        return super().all_reduce(tensor)


class Pair:
    """A generator and a critic on one rank, each with a communicator of its own."""

    def __init__(self, rank: int, groups: tuple[ThreadGroup, ThreadGroup], *, norm: bool) -> None:
        torch.manual_seed(rank)  # rank 0's are broadcast
        self.rank = rank
        layer = nn.BatchNorm1d(4) if norm else nn.LayerNorm(4)
        self.make = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)).double()
        self.judge = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 1)).double()
        self.links = [Counting(group, rank) for group in groups]
        self.opt_m, self.opt_j = (
            torch.optim.SGD(model.parameters(), lr=0.1) for model in (self.make, self.judge)
        )
        self.group = ReplicaGroup(
            [
                replica_of(self.make, self.opt_m, self.links[0]),
                replica_of(self.judge, self.opt_j, self.links[1]),
            ]
        )

    def input(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * number + self.rank)
        return torch.randn(4, 3, dtype=torch.float64, generator=generator)

    def both(self, number: int) -> Tensor:
        loss: Tensor = self.judge(self.make(self.input(number))).pow(2).mean()
        return loss

    def sent(self, act: Callable[[], object]) -> tuple[int, int]:
        """Return how many all-reduces each communicator starts meanwhile."""
        before = [link.count for link in self.links]
        act()
        first, second = (link.count - old for link, old in zip(self.links, before, strict=True))
        return first, second


def replica_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, communicator: Communicator
) -> GroupedReplica:
    def make(buckets: Sequence[Bucket]) -> Method:
        updater = make_updater(optimizer, buckets)
        made = make_allreduce(buckets, communicator, updater, RunningStatistics(nn.Module()))
        return Method.by_gradients(made)

    return GroupedReplica(
        model,
        optimizer,
        run_of(communicator),
        GivenBuilder(make, 10**6),
        share=BatchShare(),
        scope=Scope(),
        purpose="steps",
        gradients="steps",
    )


def on_ranks(size: int, function: Callable[[Pair], Any], *, norm: bool = False) -> list[Any]:
    groups = (ThreadGroup(size, LIMIT), ThreadGroup(size, LIMIT))
    return run_ranks(size, lambda own: function(Pair(own.rank, groups, norm=norm)))


def test_a_model_that_no_optimizer_steps_sends_nothing() -> None:
    def train(pair: Pair) -> list[tuple[int, int]]:
        def generator_only() -> None:
            with replica_step(pair.group, 0, 0.5):
                pair.both(0).backward()
                pair.opt_m.step()

        def neither() -> None:
            with replica_step(pair.group, 1, 0.5):
                pair.both(1).backward()

        return [pair.sent(generator_only), pair.sent(neither)]

    assert on_ranks(2, train) == [[(1, 0), (0, 0)]] * 2


def test_gradients_that_a_step_leaves_may_be_replaced_but_not_used() -> None:
    def train(pair: Pair) -> None:
        weight: Any = pair.judge[0].weight
        for number in range(2):
            with replica_step(pair.group, number, 0.5):
                pair.both(0).backward()
                pair.opt_m.step()
            with pytest.raises(ConfigError, match=r"Sequential was used after a step in which"):
                weight.grad.norm()
            for p in pair.judge.parameters():
                p.grad = None
            assert pair.sent(lambda: pair.judge.zero_grad()) == (0, 0)
        assert weight.grad is None

    on_ranks(2, train)


def test_gradients_of_another_pass_that_are_zeroed_are_sent_once() -> None:
    def train(pair: Pair) -> tuple[int, int]:
        def step() -> None:
            with replica_step(pair.group, 0, 0.5):
                pair.both(0).backward()
                pair.opt_m.step()
                pair.opt_j.zero_grad(set_to_none=pair.rank > 0)
                pair.both(1).backward()
                pair.opt_j.step()

        return pair.sent(step)

    assert on_ranks(2, train) == [(1, 1)] * 2


def test_an_interrupted_update_is_dropped_where_a_scaler_skips_the_step() -> None:
    def train(pair: Pair) -> list[Tensor]:
        before = [p.detach().clone() for p in pair.judge.parameters()]
        with replica_step(pair.group, 0, 0.5):
            pair.both(0).backward()
            pair.group.replicas[1].reduce()  # and no step, as after an overflow
            pair.opt_m.step()
        pair.group.settle()
        assert all(map(torch.equal, before, pair.judge.parameters()))
        with replica_step(pair.group, 1, 0.5):
            pair.opt_j.zero_grad()
            pair.both(1).backward()
            pair.opt_j.step()
        pair.group.settle()
        return [p.detach().clone() for p in pair.judge.parameters()]

    first, second = on_ranks(2, train)
    assert all(map(torch.equal, first, second))


def test_the_replica_check_sums_all_models() -> None:
    def train(pair: Pair) -> None:
        first, second = (
            StateObjects(model=model, optimizer=optimizer)
            for model, optimizer in ((pair.make, pair.opt_m), (pair.judge, pair.opt_j))
        )

        def checksums() -> Mapping[str, int]:
            parts = ChecksumParts()
            objects = replace(first, others=[second])
            copier = StateCopier(parts, SnapshotName("", 0), objects, {})
            pair.group.copy_now(copier)
            return parts.result()

        before = checksums()
        with torch.no_grad():
            pair.judge[2].bias.add_(1)  # type: ignore[operator]
        after = checksums()
        assert before.keys() == after.keys()
        changed = [name for name, checksum in before.items() if after[name] != checksum]
        assert changed == ["2.bias (model and optimizer 2)"]

    on_ranks(2, train)


def test_the_summary_of_a_step_has_a_bit_for_each_optimizer() -> None:
    def train(pair: Pair) -> list[int]:
        found = []
        for number, optimizers in enumerate([(), (pair.opt_m,), (pair.opt_m, pair.opt_j)]):
            with replica_step(pair.group, number, 0.5):
                pair.both(number).backward()
                for optimizer in optimizers:
                    optimizer.step()
            found.append(pair.group.stepped)
        return found

    assert on_ranks(2, train) == [[0, 1, 3]] * 2


def test_ranks_may_exchange_models_in_different_orders() -> None:
    """Rank 0 waits for the second model's gradients before the others have sent any."""
    waiting = threading.Event()

    def train(pair: Pair) -> list[Tensor]:
        with replica_step(pair.group, 0, 1 / 3):
            pair.both(0).backward()
            if pair.rank == 0:
                waiting.set()
                pair.group.replicas[1].reduce()
            else:
                assert waiting.wait(LIMIT)
            pair.opt_m.step()
            pair.opt_j.step()
        pair.group.settle()
        return [p.detach().clone() for model in (pair.make, pair.judge) for p in model.parameters()]

    found = on_ranks(3, train)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize("ranks", [2, 3])
def test_statistics_that_move_in_another_models_pass_are_averaged(ranks: int) -> None:
    def train(pair: Pair) -> tuple[Tensor, Tensor]:
        norm: Any = pair.judge[1]
        with replica_step(pair.group, 0, 1 / ranks):
            pair.both(0).backward()
            pair.opt_m.step()
        local = norm.running_mean.clone()
        pair.judge.eval()  # settles
        return local, norm.running_mean.clone()

    found = on_ranks(ranks, train, norm=True)
    mean = torch.stack([local for local, _ in found]).mean(0)
    assert not torch.allclose(found[0][0], mean, atol=1e-6)
    for _, averaged in found:
        assert torch.equal(averaged, found[0][1])
        assert torch.allclose(averaged, mean, atol=1e-15)


def test_statistics_that_no_rank_moves_keep_all_bits() -> None:
    def train(pair: Pair) -> Tensor:
        norm: Any = pair.judge[1]
        for number in range(2):
            with replica_step(pair.group, number, 1 / 3):
                pair.both(number).backward()
                pair.opt_j.step()
            pair.opt_j.zero_grad()
            pair.judge.eval()
            if number == 0:
                first = norm.running_var.clone()
        return torch.stack([first, norm.running_var])

    found = on_ranks(3, train, norm=True)
    for each in found:
        assert torch.equal(each, found[0])
        assert torch.equal(each[0], each[1])


def test_a_rank_that_moves_no_statistics_gets_the_others() -> None:
    def train(pair: Pair) -> Tensor:
        norm: Any = pair.judge[1]
        with replica_step(pair.group, 0, float(pair.rank == 0)):
            if pair.rank == 0:  # the other one has no samples
                pair.both(0).backward()
            pair.opt_j.step()
        pair.group.settle()
        return norm.running_mean.clone()  # type: ignore[no-any-return]

    first, second = on_ranks(2, train, norm=True)
    assert torch.equal(first, second)
    assert first.abs().max() > 0
