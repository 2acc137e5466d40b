"""Snapshots at step boundaries: all ranks take, commit and stop taking the same ones."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.cluster.supervision.stop_signals import StopSignals
from paceline.comm.communicator import Communicator
from paceline.data.order import Order
from paceline.errors import CommError, Message
from paceline.generation.run import Run
from paceline.run.recovery.recovery import Successor
from paceline.run.steps import Steps
from paceline.snapshots import step_snapshots
from paceline.snapshots.objects import StateObjects
from paceline.snapshots.position import Position
from paceline.snapshots.schedule import SavePolicy
from paceline.snapshots.step_snapshots import StepSnapshots
from tests.harness.equivalence.large_batch import convnet
from tests.harness.equivalence.one_rank import Bench
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.equivalence.steps_by_hand import run_step
from tests.harness.membership.given_membership import GivenMembership
from tests.harness.processes.worlds import run_of

ORDER = Order(size=400, batch_size=4)
CPU = torch.device("cpu")


class Rank:
    """One rank's steps, and the snapshots that they take."""

    def __init__(self, c: Communicator, **options: Any) -> None:
        self.bench, self.c = Bench.of(c, options.pop("model")), c
        self.run: Run = run_of(c)
        self.notes: list[Message] = []
        objects = StateObjects(model=self.bench.model, optimizer=self.bench.optimizer)
        self.snapshots = StepSnapshots(
            self.run, self.bench.replica, objects, report=self.notes.append, **options
        )
        self.steps = Steps(
            self.bench.replica,
            self.run,
            None,
            seed=5,
            position=Position(),
            policy=SavePolicy(),
            requests=StopSignals(),
            snapshots=self.snapshots,
        )

    def train(self, steps: int) -> list[tuple[int, ...]]:
        """Train; return the steps of the snapshots that are held, after each step."""
        held = []
        for number in range(steps):
            with run_step(self.steps, ORDER.place(0, number, self.c.rank, self.c.world_size)):
                self.bench.backward(number % 4)
                self.bench.optimizer.step()
                self.bench.optimizer.zero_grad()
            held.append(tuple(name.step for name in self.snapshots.held))
        return held


def on_two(work: Callable[[Communicator], Any]) -> list[Any]:
    return run_ranks(2, work)


def with_model(**options: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    return {"model": convnet(), **options}


def test_a_snapshot_is_committed_two_steps_later_and_older_ones_are_dropped() -> None:
    options = with_model()
    held = on_two(lambda c: Rank(c, **options).train(6))
    assert held[0] == held[1] == [(0,), (0, 1), (0, 1), (1, 3), (1, 3), (3, 5)]


def test_one_between_two_steps_is_committed_at_once() -> None:
    options = with_model()

    def work(c: Communicator) -> list[int | None]:
        rank, committed = Rank(c, **options), []
        for steps in (0, 3, 0):
            rank.train(steps)
            before = rank.snapshots._snapshots.newest_committed
            rank.steps.take_snapshot()
            name = rank.snapshots._snapshots.newest_committed
            assert name != before
            committed.append(None if name is None else name.step)
        return committed

    assert on_two(work) == [[0, 3, 3], [0, 3, 3]]


def test_all_ranks_use_the_interval_that_rank_0_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    options = with_model()
    monkeypatch.setattr(step_snapshots, "interval_of", lambda times: 4)

    def work(c: Communicator) -> tuple[int, int, tuple[int, ...]]:
        rank = Rank(c, **options)
        held = rank.train(10)
        return rank.snapshots.interval, rank.steps.position.snapshot_interval, held[-1]

    assert on_two(work) == [(4, 4, (4, 8))] * 2


def test_a_known_interval_is_used_from_the_first_step() -> None:
    options = with_model(interval=3)
    held = on_two(lambda c: Rank(c, **options).train(7))
    assert held[0] == held[1] == [(0,), (0,), (0,), (0, 3), (0, 3), (3,), (3, 6)]


def test_the_interval_is_measured_anew_where_other_parameters_are_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = with_model(interval=2)
    monkeypatch.setattr(step_snapshots, "interval_of", lambda times: 5)

    def work(c: Communicator) -> list[int]:
        rank = Rank(c, **options)
        rank.train(4)
        before = rank.snapshots.interval
        next(rank.bench.model.parameters()).requires_grad_(False)
        rank.train(8)
        return [before, rank.snapshots.interval]

    assert on_two(work) == [[2, 5]] * 2


def test_what_was_measured_before_is_forgotten_where_other_parameters_are_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options, counts = with_model(), list[int]()
    monkeypatch.setattr(step_snapshots, "interval_of", lambda times: counts.append(len(times)) or 0)

    def work(c: Communicator) -> None:
        rank = Rank(c, **options)
        rank.train(5)
        next(rank.bench.model.parameters()).requires_grad_(False)
        rank.train(12)

    on_two(work)  # of which rank 0 measures
    # Snapshots are taken in steps 0, 1 and 3; then in step 5 of the second call, its sixth.
    assert counts[:4] == [1, 2, 4, 6]


def test_a_copy_counts_in_the_step_that_made_it() -> None:
    """A step that takes none, because the next one's will be written, has none either."""
    options = with_model()

    def work(c: Communicator) -> list[float]:
        rank = Rank(c, **options)
        rank.train(1)
        rank.snapshots.measure(1.0)
        return [copies for _, copies in rank.snapshots._times or ()]

    copies, of_other = on_two(work)
    assert copies[0] > 0
    assert copies[1:] == [0.0]
    assert of_other == []  # rank 0 measures


def test_a_known_interval_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    options = with_model(interval=2)
    monkeypatch.setattr(step_snapshots, "interval_of", lambda times: 5)

    def work(c: Communicator) -> int:
        rank = Rank(c, **options)
        rank.train(9)
        return rank.snapshots.interval

    assert on_two(work) == [2, 2]


def test_a_limit_of_memory_that_is_too_small_ends_the_snapshots_of_all_ranks() -> None:
    options = with_model(limit_mb=1e-3)

    def work(c: Communicator) -> tuple[tuple[int, ...], list[str]]:
        rank = Rank(c, **options)
        return rank.train(6)[-1], [str(note) for note in rank.notes]

    (held, notes), (other_held, other_notes) = on_two(work)
    assert (held, other_held, other_notes) == ((), (), [])
    (note,) = notes
    assert "--snapshot_memory_mb 0.001" in note


def test_a_rank_alone_takes_none() -> None:
    options = with_model()
    assert run_ranks(1, lambda c: Rank(c, **options).train(3)) == [[(), (), ()]]


def test_what_a_lost_generation_has_is_released_before_the_next_one_is_made() -> None:
    options = with_model()

    def work(c: Communicator) -> list[bool]:
        rank = Rank(c, **options)
        rank.train(2)
        rank.steps.run.membership = GivenMembership(next_generation=refuse)
        kept = [weakref.ref(rank.bench.replica._binding.synchronizer)]
        error = lost(kept)
        rank.steps.recovery.leave_generation(error)
        gc.collect()
        return [each() is None for each in kept]

    assert run_ranks(1, work) == [[True, True]]


def refuse(error: CommError) -> Successor:
    raise error


def lost(kept: list[Any]) -> CommError:
    """Return an error one of whose frames has an object, which is added to what is kept."""

    def lose() -> None:
        of_frame = nn.Linear(1, 1)
        kept.append(weakref.ref(of_frame))
        raise CommError("a peer was lost.")

    try:
        lose()
    except CommError as error:
        return error
    raise AssertionError
