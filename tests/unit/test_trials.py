"""Of several exchanges the fastest is found in a run's own steps, whatever the machine does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.comm.communicator import Communicator
from paceline.run.autotune.trials import COUNTED, SKIPPED, Outcome, Trials, steps_of_trials
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.processes.worlds import run_of
from tests.harness.timelines import GivenTime

BLOCK = SKIPPED + COUNTED


class Machine:
    """Steps that take as long as is said, on a clock of their own.

    Args:
        seconds: of (candidate, number of the step).
    """

    def __init__(self, seconds: Callable[[int, int], float]) -> None:
        self.seconds, self.timeline = seconds, GivenTime()
        self.tried: list[int] = []

    def run(
        self,
        count: int,
        communicator: Communicator | None = None,
    ) -> Outcome:
        trials = Trials(count, run_of(communicator, timeline=self.timeline))
        while True:
            candidate = trials.begin()
            if trials.outcome is not None:
                assert candidate == trials.outcome.chosen == trials.begin()
                return trials.outcome
            self.timeline.passes(self.seconds(candidate, len(self.tried)))
            self.tried.append(candidate)


def steady(*seconds: float) -> Machine:
    """Make a machine on which a candidate's steps take equally long."""
    return Machine(lambda candidate, _: seconds[candidate])


def test_all_are_tried_in_turns_and_the_fastest_three_once_more_the_other_way_round() -> None:
    machine = steady(0.5, 0.3, 0.6, 0.2, 0.4)
    outcome = machine.run(5)
    assert machine.tried == [c for c in (0, 1, 2, 3, 4, 4, 3, 1) for _ in range(BLOCK)]
    assert len(machine.tried) == steps_of_trials(5)
    assert outcome.chosen == 3
    assert outcome.seconds == pytest.approx({0: 0.5, 1: 0.3, 2: 0.6, 3: 0.2, 4: 0.4})


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [((1.0, 1.005), 0), ((1.005, 1.0), 0), ((1.02, 1.0), 1), ((1.02, 1.0, 1.005), 1)],
)
def test_of_those_that_are_equal_but_for_noise_the_first_is_taken(
    seconds: tuple[float, ...], chosen: int
) -> None:
    assert steady(*seconds).run(len(seconds)).chosen == chosen


def test_the_first_steps_of_a_block_do_not_count() -> None:
    machine = Machine(lambda c, n: 60.0 if n % BLOCK < SKIPPED else (0.3, 0.2)[c])
    assert machine.run(2).seconds == pytest.approx({0: 0.3, 1: 0.2})


def test_an_evaluation_between_two_steps_does_not_count() -> None:
    machine = Machine(lambda c, n: (0.3, 0.2)[c] + (60.0 if n % BLOCK == SKIPPED + 1 else 0))
    assert machine.run(2).seconds == pytest.approx({0: 0.3, 1: 0.2})


@pytest.mark.parametrize("drift", [0.01, -0.01])
def test_a_machine_that_grows_slower_or_faster_favours_nobody(drift: float) -> None:
    machine = Machine(lambda c, n: (1.06, 1.0, 1.06)[c] * (1 + drift * n))
    assert machine.run(3).chosen == 1


def test_what_varies_from_round_to_round_has_to_win_by_more() -> None:
    """The second candidate is 1.5 % faster on the mean, and its rounds differ by 8 %."""
    rough = Machine(lambda c, n: 1.0 if c == 0 else 0.945 if n < 2 * BLOCK else 1.025)
    outcome = rough.run(2)
    assert outcome.seconds == pytest.approx({0: 1.0, 1: 0.985})
    assert outcome.noise == pytest.approx(0.02, abs=1e-3)
    assert outcome.chosen == 0
    assert steady(1.0, 0.985).run(2).chosen == 1


def test_noise_is_no_excuse_for_what_is_much_slower() -> None:
    wild = Machine(lambda c, n: (1.2, 1.0)[c] * (0.5 if c == 1 and n < 2 * BLOCK else 1))
    outcome = wild.run(2)
    assert outcome.noise == 0.03
    assert outcome.chosen == 1


def test_the_ranks_decide_by_their_mean() -> None:
    """What is slow here is what the others are fast with."""
    seconds = ((0.2, 0.3), (0.9, 0.4))
    for outcome in run_ranks(2, lambda c: steady(*seconds[c.rank]).run(2, c)):
        assert outcome.seconds == pytest.approx({0: 0.55, 1: 0.35})
        assert outcome.chosen == 1
