"""What a server is predicted to gain, by the times of the workers' steps."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import pytest

from paceline.run.autotune.server_proposal import ServerProposal, mean_step, propose_server

STEPS = 24


def in_turn(slow: float = 90.0, fast: float = 30.0, workers: int = 3) -> list[list[float]]:
    """Return times where one worker after another is slow, for two steps each."""
    turns = [step // 2 % workers for step in range(STEPS)]
    return [[slow if rank == turn else fast for rank in range(workers)] for turn in turns]


@pytest.mark.parametrize(
    "times",
    [
        pytest.param([[50.0] * 3] * STEPS, id="even"),
        pytest.param([[50.0, 50.0, 150.0]] * STEPS, id="one always slow"),
        pytest.param([[50.0] * 3, [150.0] * 3] * 12, id="all slow at once"),
        pytest.param([[50.0]] * STEPS, id="one worker"),
        pytest.param(in_turn(9.0, 3.0), id="too short to tell"),
        pytest.param(in_turn(33.0, 30.0), id="a small difference"),
    ],
)
def test_without_a_gain_there_is_no_proposal(times: list[list[float]]) -> None:
    assert propose_server(times) is None


def test_workers_that_are_slow_in_turn_gain_by_staleness() -> None:
    sentence = propose_server(in_turn())
    found = re.fullmatch(
        r"exchange: workers take turns to be slow \(the slowest of a step needs 90 ms on average, "
        r"and each 50 ms\): --sync server --staleness 2 would train about (\S+) times as fast\. "
        r"--num_servers 1 starts one\. .*",
        str(sentence),
    )
    assert found, sentence
    assert 1.6 <= float(found[1]) <= 1.8  # by an unbounded staleness 90 / 50


def test_a_worker_that_is_always_slower_needs_a_smaller_share_besides() -> None:
    times = [[3 * first, *others] for first, *others in in_turn()]
    assert " --staleness 2 --shares measured would train about " in str(propose_server(times))


def test_a_server_whose_port_is_the_bottleneck_is_not_proposed() -> None:
    assert "about 1.2 times" in str(propose_server(in_turn(), port_ms=75.0))
    assert propose_server(in_turn(), port_ms=85.0) is None


def test_a_window_must_be_confirmed_by_another() -> None:
    proposal = ServerProposal(port_ms=1.0)
    assert proposal.add(in_turn())
    assert proposal.sentence() is None
    assert not proposal.add(in_turn())
    assert str(proposal.sentence()) == str(propose_server(in_turn() + in_turn(), 1.0))
    even = ServerProposal(port_ms=1.0)
    assert even.add(in_turn())
    assert not even.add([[50.0] * 3] * STEPS)
    assert even.sentence() is None


def simulated(times: Sequence[Sequence[float]], staleness: int) -> float:
    """Return the mean step of workers that are simulated event by event."""
    done = [0] * len(times[0])
    busy: dict[int, float] = {}
    now = 0.0
    while min(done) < len(times) or busy:
        for rank, step in enumerate(done):
            ready = rank not in busy and step < len(times) and step - min(done) <= staleness
            if ready:
                busy[rank] = now + times[step][rank]
        now = min(busy.values())
        for rank in [rank for rank, end in busy.items() if end == now]:
            del busy[rank]
            done[rank] += 1
    return now / len(times)


@pytest.mark.parametrize("staleness", [0, 1, 2, 5])
def test_a_mean_step_is_that_of_a_simulation(staleness: int) -> None:
    drawn = random.Random(staleness)
    for _ in range(20):
        times = [[drawn.choice((10.0, 37.5, 90.0)) for _ in range(3)] for _ in range(STEPS)]
        assert mean_step(times, staleness=staleness) == pytest.approx(simulated(times, staleness))
