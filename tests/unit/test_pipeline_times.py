"""When the tasks of a schedule run: against the formulas of the papers, and by hand."""

from __future__ import annotations

import pytest

from paceline.parallel.schedule_times import (
    Link,
    PassSeconds,
    Span,
    idle_shares,
    simulate,
    step_seconds,
)
from paceline.parallel.schedules import SCHEDULES, Schedule, Task

SIZES = [(stages, m) for stages in range(1, 7) for m in range(stages, 4 * stages + 1)]


def passes(forward: float, inputs: float, weights: float) -> PassSeconds:
    return {
        "forward": forward,
        "backward": inputs + weights,
        "backward_input": inputs,
        "backward_weight": weights,
    }


def even(schedule: Schedule, one: PassSeconds) -> list[Span]:
    """Simulate equal stages with nothing to send."""
    return simulate(schedule, [one] * len(schedule), [Link()] * (len(schedule) - 1))


def starts(spans: list[Span], stage: int, kind: str) -> list[float]:
    return [span.start for span in spans if (span.stage, span.task.kind) == (stage, kind)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("one", [passes(1, 1, 1), passes(2, 1, 0.5), passes(1, 3, 4)])
def test_the_bubble_of_even_stages_is_that_of_the_papers(name: str, one: PassSeconds) -> None:
    for stages, microbatches in SIZES:
        spans = even(SCHEDULES[name](stages, microbatches), one)
        share = (stages - 1) / (microbatches + stages - 1)
        assert idle_shares(spans) == pytest.approx([share] * stages)
        rounds = microbatches + stages - 1
        assert step_seconds(spans) == pytest.approx(rounds * (one["forward"] + one["backward"]))


@pytest.mark.parametrize(
    ("forward", "inputs", "weights"), [(1, 1, 1), (1, 1.25, 0.75), (2, 1, 1), (1, 2, 1), (1, 2, 0)]
)
def test_zb_h1_has_the_bubble_of_its_paper(forward: float, inputs: float, weights: float) -> None:
    for stages, microbatches in SIZES:
        spans = even(SCHEDULES["zb-h1"](stages, microbatches), passes(forward, inputs, weights))
        busy = microbatches * (forward + inputs + weights)
        bubble = (stages - 1) * (forward + inputs - weights)
        assert step_seconds(spans) == pytest.approx(busy + bubble)
        assert idle_shares(spans) == pytest.approx([bubble / (busy + bubble)] * stages)


def test_no_schedule_is_slower_than_gpipe_on_even_stages_without_links() -> None:
    for stages, microbatches in SIZES:
        seconds = {
            name: step_seconds(even(make(stages, microbatches), passes(1, 1, 1)))
            for name, make in SCHEDULES.items()
        }
        assert seconds["zb-h1"] <= seconds["1f1b"] == seconds["gpipe"]


def test_sending_overlaps_computing_and_a_link_carries_one_microbatch_at_a_time() -> None:
    """Stage 1's passes are short, so it waits for the link.

    stage 0     F0 F1 .  .  .  .  .  .  B0 .  .  B1
    link        .  0----- 1----- .
    stage 1     .  .  .  .  F0 .  .  F1 B0 ...
    """
    spans = simulate(
        SCHEDULES["gpipe"](2, 2),
        [{"forward": 1, "backward": 1}, {"forward": 0.5, "backward": 0.25}],
        [Link(sending=3, latency=0.5)],
    )
    assert starts(spans, 0, "forward") == [0, 1]
    assert starts(spans, 1, "forward") == [4.5, 7.5]  # 1 + 3 + 0.5; the link is free at 4
    assert starts(spans, 1, "backward") == [8, 8.25]
    assert starts(spans, 0, "backward") == [11.75, 14.75]  # 8.25 + 3 + 0.5; free at 11.25
    assert step_seconds(spans) == 15.75
    assert idle_shares(spans) == pytest.approx([1 - 4 / 15.75, 1 - 1.5 / 15.75])


def test_both_ways_of_a_link_are_busy_at_once() -> None:
    """B0's gradients leave stage 1 at 12, while F1's activations travel from 8 to 14."""
    spans = simulate(
        SCHEDULES["1f1b"](2, 3), [{"forward": 2, "backward": 2}] * 2, [Link(sending=6)]
    )
    assert starts(spans, 1, "forward") == [8, 14, 28]
    assert starts(spans, 1, "backward") == [10, 16, 30]
    assert starts(spans, 0, "forward") == [0, 2, 20]
    assert starts(spans, 0, "backward") == [18, 24, 38]


def test_the_slowest_stage_decides() -> None:
    slow = [{"forward": 1.0, "backward": 2.0}, {"forward": 2.0, "backward": 4.0}]
    spans = simulate(SCHEDULES["1f1b"](2, 8), slow, [Link()])
    assert step_seconds(spans) == 1 + 8 * (2 + 4) + 2
    assert idle_shares(spans)[1] == pytest.approx(3 / 51)


def test_measured_spans_may_begin_late() -> None:
    spans = [Span(0, Task("forward", 0), 5, 6), Span(1, Task("forward", 0), 7, 9)]
    assert step_seconds(spans) == 4
    assert idle_shares(spans) == [0.75, 0.5]
