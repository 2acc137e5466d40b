"""Shares that follow measured speeds: the same on all ranks, at the same step, after a rollback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from paceline.comm.communicator import Communicator
from paceline.data.order import Order
from paceline.recorder import NullRecorder
from paceline.run.autotune.server_proposal import ServerProposal
from paceline.run.worker_speeds import COMPARED, FIRST, LEAD, UNTIMED, WorkerSpeeds
from paceline.snapshots.position import Position
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.processes.worlds import run_of
from tests.harness.timelines import GivenTime

ORDER = Order(size=1_001 * 64 + 10, batch_size=64)


class Events(NullRecorder):
    """Keeps the events `speeds`, and the notes."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.notes: list[object] = []

    def event(self, name: str, **fields: object) -> None:
        if name == "speeds":
            self.events.append(fields)
        elif name == "note":
            self.notes.append(fields["text"])


class Rank:
    """One rank's steps, whose time is a number: its samples' costs, and a wait for the others.

    As in `Steps`, a summary is received one step later and obeyed two steps later.
    """

    def __init__(
        self,
        communicator: Communicator,
        costs: Sequence[float],
        position: Position | None = None,
        *,
        measured: bool = True,
        usual_only: bool = False,
        proposal: ServerProposal | None = None,
    ) -> None:
        self.costs, self.rank = costs, communicator.rank
        self.position = position or Position()
        self.recorder = Events()
        self.timeline = GivenTime()  # in which nothing passes while summaries are awaited
        self.run = run_of(communicator, recorder=self.recorder, timeline=self.timeline)
        self.speeds = WorkerSpeeds(
            self.run,
            self.position,
            measured=measured,
            usual_only=usual_only,
            proposal=proposal,
        )
        self.speeds.batch_size = ORDER.batch_size

    def train(self, steps: int, fraction: float | None = None) -> list[tuple[int, ...]]:
        """Make steps; return the number of samples of each rank in each of them.

        Args:
            fraction: the weight that a script gives to this rank's loss; None: by its samples.
        """
        summaries, made = self.run.context.summaries, []
        for number in range(self.position.number, self.position.number + steps):
            place = ORDER.place(0, number, self.rank, len(self.costs), self.speeds.shares(number))
            place = replace(place, fraction=fraction)
            counts = tuple(b - a for a, b in zip(place.cuts, place.cuts[1:], strict=False))
            for summary in summaries.receive(before=number - 1):
                self.speeds.act(summary, summary.rows[0])
            times = [1e-3 * ms * max(1, n) for ms, n in zip(self.costs, counts, strict=True)]
            self.timeline.passes(times[self.rank])
            self.timeline.spend(max(times) - times[self.rank], "wait", bucket=0)
            reported = self.speeds.row(place)
            summaries.send(number, torch.zeros(0).double(), stop=False, rows=[reported])
            made.append(counts)
            self.position.number = number + 1
        return made


def trained(steps: int, *costs: float, measured: bool = True) -> list[list[tuple[int, ...]]]:
    return run_ranks(len(costs), lambda c: Rank(c, costs, measured=measured).train(steps))


@pytest.mark.parametrize("costs", [(1.0, 3.0), (3.0, 1.0), (1.0, 1.0, 5.0)])
def test_all_ranks_place_the_same_shares_by_speed(costs: tuple[float, ...]) -> None:
    first, *others = trained(60, *costs)
    assert all(other == first for other in others)
    assert first[: UNTIMED + LEAD] == [first[0]] * (UNTIMED + LEAD)
    ideal = [64 / ms / sum(1 / each for each in costs) for ms in costs]
    assert first[-1] == pytest.approx(ideal, abs=1)
    changed = [number for number in range(1, 60) if first[number] != first[number - 1]]
    assert 1 <= len(changed) <= 3
    assert changed[0] <= UNTIMED + 10


@pytest.mark.parametrize(("usual_only", "measured"), [(True, False), (False, True)])
def test_steps_that_a_script_weights_move_shares_only_where_it_asked_for_them(
    usual_only: bool, measured: bool
) -> None:
    def work(communicator: Communicator) -> list[tuple[int, ...]]:
        return Rank(communicator, (1.0, 3.0), usual_only=usual_only).train(60, fraction=0.5)

    assert run_ranks(2, work)[0][-1] == ((48, 16) if measured else (32, 32))


def test_a_speed_that_changes_moves_the_shares_within_ten_steps() -> None:
    def work(communicator: Communicator) -> list[tuple[int, ...]]:
        rank = Rank(communicator, (1.0, 1.0))
        made = rank.train(40)
        rank.costs = (1.0, 3.0)
        made += rank.train(40)
        rank.costs = (1.0, 1.0)
        return made + rank.train(40)

    made, other = run_ranks(2, work)
    assert made == other
    assert set(made[:40]) == {(32, 32)}
    assert made[50] == (48, 16)
    assert made[90] == made[-1] == (32, 32)


def test_a_position_continues_with_its_shares_and_those_that_are_planned() -> None:
    """A run that is restored from any step places it as it did."""

    def work(communicator: Communicator) -> None:
        rank, saved = Rank(communicator, (1.0, 3.0)), []
        made = []
        for _ in range(30):
            saved.append(asdict(rank.position))
            made += rank.train(1)
        assert len(set(made)) > 1
        for number, position in enumerate(saved):
            resumed = Rank(communicator, (1.0, 3.0), Position(**position))
            assert resumed.train(1) == [made[number]]

    run_ranks(2, work)


def test_an_evaluation_has_the_shares_of_the_next_step_on_all_ranks() -> None:
    def work(communicator: Communicator) -> list[tuple[Any, tuple[int, ...]]]:
        rank = Rank(communicator, (1.0, 3.0))
        return [(rank.speeds.present_shares(), *rank.train(1)) for _ in range(30)]

    found, others = run_ranks(2, work)
    assert found == others
    assert found[0] == (None, (32, 32))
    assert found[-1][0] == list(found[-1][1]) == [48, 16]
    assert all(shares is None or tuple(shares) == made for shares, made in found)


def test_other_numbers_of_ranks_begin_with_equal_shares() -> None:
    def work(communicator: Communicator) -> None:
        position = Position(number=40, shares=[(20, [48, 16])])
        assert Rank(communicator, (1.0, 1.0, 1.0), position).train(1) == [(22, 21, 21)]
        assert position.shares == []

    run_ranks(3, work)


def test_equal_shares_take_the_place_of_measured_ones_where_they_are_asked_for() -> None:
    def work(communicator: Communicator) -> None:
        position = Position(number=40, shares=[(20, [48, 16])])
        assert Rank(communicator, (1.0, 3.0), position, measured=False).train(1) == [(32, 32)]

    run_ranks(2, work)


@pytest.mark.parametrize(("costs", "named"), [((1.0, 3.0), True), ((1.0, 1.05), False)])
def test_equal_shares_say_once_which_rank_is_slow(costs: tuple[float, float], named: bool) -> None:
    def work(communicator: Communicator) -> list[str]:
        rank = Rank(communicator, costs, measured=False)
        made = rank.train(200)
        assert set(made) == {(32, 32)}
        assert rank.speeds.due == float("inf")
        (event,) = rank.recorder.events
        assert event["step"] < FIRST + COMPARED + 2
        assert event["slowest"] == (1 if named else None)
        assert event["milliseconds"] == pytest.approx(costs)
        return rank.recorder.notes

    first, other = run_ranks(2, work)
    assert other == []
    if not named:
        assert first == []
        return
    assert first == [
        "workers differ in speed: rank 1 on machine 0 (a) needs 3 ms a sample, and the fastest 1 "
        "ms. With --shares measured, the slowest would compute for 48 ms a step instead of 96 ms."
    ]


def test_ranks_whose_speeds_only_vary_are_not_reported() -> None:
    def work(communicator: Communicator) -> list[object]:
        rank = Rank(communicator, (1.0, 1.0), measured=False)
        for step in range(60):
            late = step % 3 < 2  # two of three steps: the median is three times as high
            rank.costs = (1.0, 3.0) if late else (1.0, 1.0)
            rank.train(1)
        (event,) = rank.recorder.events
        return [event["slowest"], rank.recorder.notes]

    assert run_ranks(2, work) == [[None, []], [None, []]]


@pytest.mark.parametrize(
    ("slow", "port_ms", "said"),
    [
        ("in turn", 1.0, "exchange: workers take turns to be slow (the slowest of a step needs"),
        ("in turn", None, None),  # what a server's port carries is unknown
        ("in turn, once", 1.0, None),
        ("always", 1.0, "workers differ in speed: rank 1"),
        ("never", 1.0, None),
    ],
)
def test_a_run_that_measures_its_exchange_says_once_what_would_gain(
    slow: str, port_ms: float | None, said: str | None
) -> None:
    def work(communicator: Communicator) -> list[object]:
        proposal = ServerProposal(port_ms=port_ms)
        rank = Rank(communicator, (1.0, 1.0), measured=False, proposal=proposal)
        for step in range(120):
            turn = step // 2 % 2 if slow.startswith("in turn") else int(slow == "always")
            if slow == "never" or (slow == "in turn, once" and step > FIRST + COMPARED):
                turn = 2
            rank.costs = tuple(3.0 if r == turn else 1.0 for r in range(2))
            rank.train(1)
        assert rank.speeds.due == float("inf")
        return rank.recorder.notes

    first, other = run_ranks(2, work)
    assert other == []
    assert [str(note).startswith(str(said)) for note in first] == [True] * (said is not None)


def test_measured_shares_name_the_slow_rank() -> None:
    def work(communicator: Communicator) -> list[str]:
        rank = Rank(communicator, (1.0, 3.0))
        rank.train(60)
        assert [event["shares"] for event in rank.recorder.events] == [[48, 16]]
        return rank.recorder.notes

    first, other = run_ranks(2, work)
    assert other == []
    assert first == [
        "shares: 48, 16 of 64 samples from step 10 on; rank 1 on machine 0 (a) needs 3 ms a "
        "sample, and the fastest 1 ms."
    ]


def test_a_step_that_was_interrupted_is_not_measured() -> None:
    def work(communicator: Communicator) -> None:
        rank = Rank(communicator, (1.0, 1.0))
        made = []
        for _ in range(60):
            if rank.rank:
                rank.timeline.passes(5.0)  # an evaluation, on one rank
            rank.speeds.interrupt()
            made += rank.train(1)
        assert set(made) == {(32, 32)}

    run_ranks(2, work)


def test_ranks_that_noticed_a_loss_at_different_boundaries_then_measure_the_same_steps() -> None:
    """Otherwise their summaries' rows differ in length, at which Gloo aborts a process."""

    def work(communicator: Communicator) -> list[float]:
        rank = Rank(communicator, (1.0, 1.0), measured=False)
        rank.train(FIRST + COMPARED // 2)
        for summary in rank.run.context.summaries.receive(before=rank.position.number):
            if rank.rank:  # the other's boundary isn't passed: what it hasn't received is dropped
                rank.speeds.act(summary, summary.rows[0])
        rank.speeds.begin_generation()
        due = []
        for _ in range(FIRST + 3 * COMPARED):
            rank.speeds.interrupt()  # no step can be timed, so their number ends the measurement
            rank.train(1)
            due.append(rank.speeds.due)
        return due

    first, other = run_ranks(2, work)
    assert first == other
    assert first[0] == 2 * FIRST + COMPARED // 2
    assert first[-1] == float("inf")
