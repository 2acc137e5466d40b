"""A step's summary: the sums, and what follows from the reports of one, some or all ranks."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from paceline.comm.communicator import Communicator
from paceline.comm.host_copy import HostCopy
from paceline.comm.peer_activities import NO_PEERS, WaitLimit
from paceline.comm.single_rank import SingleRankCommunicator
from paceline.errors import CommTimeout, PeerLost
from paceline.generation.summaries import StepSummaries, StepSummary
from tests.harness.equivalence.rank_threads import run_ranks
from tests.harness.twins.communicator import ThreadGroup

LIMIT = 30.0
CPU, GPU = torch.device("cpu"), torch.device("cuda")  # of which only the name is used here


def summary_of(*reports: dict[str, Any], device: torch.device = CPU) -> StepSummary:
    """Exchange the reports of one step; each rank has one, and all receive the same."""

    def on_rank(communicator: Communicator) -> StepSummary:
        summaries = StepSummaries(communicator, device)
        sums = torch.tensor([1.0, communicator.rank], dtype=torch.float64)
        summaries.send(7, sums, **{"stop": False, **reports[communicator.rank]})
        assert not list(summaries.receive(before=7))
        (summary,) = summaries.receive(before=8)
        assert not summaries.sent
        summaries.close()
        return summary

    first, *others = run_ranks(len(reports), on_rank)
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize("device", [CPU, GPU])
def test_sums_are_those_of_all_ranks_and_nothing_else_is_said(device: torch.device) -> None:
    assert summary_of({}, {}, {}, device=device) == StepSummary(
        step=7, sums=(3.0, 3.0), stop=False, request=0, acknowledged=(False, False), interval=0
    )


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
def test_one_rank_may_stop_all(ranks: tuple[int, ...]) -> None:
    assert summary_of(*({"stop": rank in ranks} for rank in range(2))).stop


@pytest.mark.parametrize("newer", [(), (0,), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("older", [(), (0, 2), (0, 1, 2)])
def test_a_snapshot_is_acknowledged_once_all_ranks_acknowledge_it(
    older: tuple[int, ...], newer: tuple[int, ...]
) -> None:
    summary = summary_of(*({"acknowledged": (r in older, r in newer)} for r in range(3)))
    assert summary.acknowledged == (len(older) == 3, len(newer) == 3)


def test_all_ranks_get_rank_0s_request_and_interval() -> None:
    summary = summary_of({"request": 2, "interval": 9}, {})
    assert (summary.request, summary.interval, summary.stop) == (2, 9, False)


def test_rank_0_alone_may_ask_for_the_last_summary_of_gpus() -> None:
    received = threading.Event()

    def on_rank(communicator: Communicator) -> list[tuple[float, ...]]:
        summaries = StepSummaries(communicator, GPU)
        for step in range(2):
            summaries.send(step, torch.ones(1, dtype=torch.float64), stop=False)
        if communicator.rank:
            assert received.wait(10)  # rank 0 has the sums that this rank hasn't asked for
        found = [summary.sums for summary in summaries.receive(before=2)]
        received.set()
        summaries.close()
        return found

    assert run_ranks(2, on_rank) == [[(2.0,), (2.0,)]] * 2


def test_the_loss_of_a_peer_ends_the_wait_for_a_summary_of_gpus() -> None:
    group = ThreadGroup(2)
    summaries = StepSummaries(group.communicator(0), GPU)
    summaries.send(0, torch.ones(1, dtype=torch.float64), stop=False)
    group.abort()
    with pytest.raises(PeerLost, match="the sums of step 0"):
        list(summaries.receive(before=1))
    summaries.close()


@pytest.mark.parametrize("lead", [0, 2])
def test_a_rank_leads_by_the_steps_that_it_may(lead: int) -> None:
    ahead = threading.Event()

    def on_rank(communicator: Communicator) -> list[int]:
        summaries = StepSummaries(communicator)
        summaries.allow_lead(lead, communicator)
        received: list[int] = []
        for step in range(6):
            if communicator.rank == 1:
                assert ahead.wait(LIMIT)
            received += [one.step for one in summaries.receive(before=step - summaries.lag)]
            if step == lead + 1:
                ahead.set()  # only now does the other rank send its first report
            summaries.send(step, torch.ones(1, dtype=torch.float64), stop=False)
        assert received == list(range(5 - summaries.lag))
        return [*received, *(one.step for one in summaries.receive(before=6))]

    assert run_ranks(2, on_rank) == [list(range(6))] * 2


@pytest.mark.parametrize(("device", "lag"), [(CPU, 0), (GPU, 1)])
def test_a_rank_alone_gets_its_own_sums_a_step_later_where_a_device_computes_them(
    device: torch.device, lag: int
) -> None:
    summaries = StepSummaries(SingleRankCommunicator(), device)
    assert summaries.lag == lag
    for step in range(3):
        sums = torch.full((2,), step + 0.5, dtype=torch.float64)
        summaries.send(step, sums, stop=step == 1, outcome=1, rows=[[2.0], [], [3.0, 4.0]])
        sums.zero_()
    first, second, third = summaries.receive(before=3)
    assert [one.sums for one in (first, second, third)] == [(0.5,) * 2, (1.5,) * 2, (2.5,) * 2]
    assert (first.stop, second.stop, second.rows, third.same_outcome) == (
        False,
        True,
        ((2.0,), (), (3.0, 4.0)),
        True,
    )


class Hanging:
    """Event of a device that hangs."""

    def query(self) -> bool:
        return False


def test_a_device_that_hangs_is_an_error_within_the_limit() -> None:
    copy = HostCopy(torch.zeros(1))
    copy._event = Hanging()
    with pytest.raises(CommTimeout) as error:
        copy.values(WaitLimit(0.01, NO_PEERS, "the sums of step 3"))
    assert str(error.value) == (
        "a GPU hasn't computed the sums of step 3 after 0.01 s: it hangs, or needs a longer "
        "--timeout (--first_iter_timeout at the start)."
    )
