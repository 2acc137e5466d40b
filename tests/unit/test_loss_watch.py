"""Which losses end a run, and which do not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import Diverged
from paceline.generation.summaries import NONE_ACKNOWLEDGED, StepSummary
from paceline.recorder import NullRecorder
from paceline.run.loss_watch import LossWatch
from tests.harness.processes.worlds import run_of


class Events(NullRecorder):
    """Recorder that keeps the events of losses."""

    def __init__(self) -> None:
        self.losses: list[Any] = []

    def event(self, name: str, **fields: object) -> None:
        self.losses.append((name, fields["step"], fields["loss"]))


def watch(max_loss: float = 40.0) -> tuple[LossWatch, Events]:
    events = Events()
    return LossWatch(run_of(recorder=events), max_loss=max_loss, folder=Path("run")), events


def check(judge: LossWatch, step: int, sums: Sequence[float]) -> None:
    judge.receive(
        StepSummary(
            step=step,
            sums=tuple(sums),
            stop=False,
            request=0,
            acknowledged=tuple(NONE_ACKNOWLEDGED),
            interval=0,
        ),
        (),
    )


def test_the_loss_of_each_step_is_recorded() -> None:
    judge, events = watch()
    check(judge, 7, [12.0, 0, 0, 8.0, 0])
    assert events.losses == [("loss", 7, 1.5)]


@pytest.mark.parametrize("loss", [math.nan, math.inf, 41.0])
def test_a_loss_that_is_no_number_or_exploded_ends_the_run(loss: float) -> None:
    judge, _ = watch()
    with pytest.raises(Diverged, match=r"The loss became .* in step 7.* run/checkpoints are valid"):
        check(judge, 7, [loss * 8, 0, 0, 8.0, 0])


def test_a_large_loss_within_an_epoch_is_accepted_where_its_end_counts() -> None:
    judge = LossWatch(run_of(), max_loss=40.0, folder=Path("run"), every=4)
    for step in (0, 1, 2, 4):
        check(judge, step, [41.0, 0, 0, 1.0, 0])
    with pytest.raises(Diverged, match="in step 7"):
        check(judge, 7, [41.0, 0, 0, 1.0, 0])
    with pytest.raises(Diverged):
        check(judge, 0, [math.nan, 0, 0, 1.0, 0])


def test_zero_accepts_any_number() -> None:
    judge, _ = watch(max_loss=0.0)
    check(judge, 7, [1e30, 0, 0, 1.0, 0])
    with pytest.raises(Diverged):
        check(judge, 8, [math.nan, 0, 0, 1.0, 0])


def test_an_overflow_of_float16_is_no_divergence() -> None:
    judge, _ = watch()
    for step in range(40):
        check(judge, step, [math.inf, 0, 0, 8.0, 2.0])
    check(judge, 40, [8.0, 0, 0, 8.0, 0])
    check(judge, 41, [math.inf, 0, 0, 8.0, 2.0])


def test_overflows_without_an_end_are() -> None:
    judge, _ = watch()
    for step in range(40):
        check(judge, step, [1.0, 0, 0, 8.0, 2.0])
    with pytest.raises(Diverged, match="overflowed float16 in 41 consecutive steps, up to step 40"):
        check(judge, 40, [1.0, 0, 0, 8.0, 2.0])
