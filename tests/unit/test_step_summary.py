"""A step's summary: the sums, and what follows from the reports of one, some or all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.comm.communicator import Communicator
from paceline.run.step_summary import StepSummaries, StepSummary
from tests.harness.equivalence.rank_threads import run_ranks


def summary_of(*reports: dict[str, Any]) -> StepSummary:
    """Exchange the reports of one step; each rank has one, and all receive the same."""

    def on_rank(communicator: Communicator) -> StepSummary:
        summaries = StepSummaries(communicator)
        sums = torch.tensor([1.0, communicator.rank], dtype=torch.float64)
        summaries.send(7, sums, **{"stop": False, **reports[communicator.rank]})
        assert not list(summaries.receive(before=7))
        (summary,) = summaries.receive(before=8)
        assert not summaries.sent
        return summary

    first, *others = run_ranks(len(reports), on_rank)
    assert all(other == first for other in others)
    return first


def test_sums_are_those_of_all_ranks_and_nothing_else_is_said() -> None:
    assert summary_of({}, {}, {}) == StepSummary(
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
