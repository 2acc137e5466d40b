"""The benchmark of pipelines: its bound, its ratios, and the idle shares of measured spans."""

from __future__ import annotations

import pytest

from tests.harness.documents.benchmark_runs import load

pipeline = load("pipeline")


def test_a_bound_is_the_critical_path_with_the_link_and_the_optimizer() -> None:
    """The path begins and ends on stage 0, whose optimizer's step comes last."""
    parts = [
        {"forward": 0.1, "backward": 0.2, "optimizer": 0.05},
        {"forward": 0.2, "backward": 0.4, "optimizer": 0.01},
    ]
    assert pipeline.bound("gpipe", 2, parts, 0.0) == pytest.approx(0.1 + 0.4 + 0.8 + 0.2 + 0.05)
    slow = 0.1 + 2 * 1.0 + 0.2 + 0.4 + 2 * 1.0 + 0.2 + 0.05  # a microbatch is sent in a second
    assert pipeline.bound("gpipe", 2, parts, 2.0) == pytest.approx(slow)


def test_the_optimizer_of_the_last_stage_may_end_last() -> None:
    parts = [{"forward": 0.1, "backward": 0.2, "optimizer": late} for late in (0.0, 1.0)]
    assert pipeline.bound("1f1b", 2, parts, 0.0) == pytest.approx(0.1 + 2 * 0.3 + 1.0)


def test_speeds_are_beside_torch_s_best_row_of_the_same_start() -> None:
    parts = [{"forward": 0.01, "backward": 0.02, "optimizer": 0.0}] * 2
    turned = {
        "line": [0.0, 0.0, 0.0],
        "torch-gpipe": [300.0, 200.0, 400.0],
        "torch-1f1b": [250.0, 220.0, 500.0],
        "1f1b": [125.0, 110.0, 100.0],
        "parts": [parts] * 3,
    }
    gpipe, torch_1f1b, ours = pipeline.results("1f1b", "1gbit", turned, 4)
    assert [gpipe["row"], torch_1f1b["row"], ours["row"]] == ["torch-gpipe", "torch-1f1b", "1f1b"]
    assert torch_1f1b["speed"].median == 1.0
    assert ours["speed"].median == 2.0
    assert gpipe["bound"] is gpipe["reached"] is None
    assert ours["bound"] == pytest.approx(1000 * (0.01 * 5 + 0.02 * 5))
    assert ours["reached"].median == pytest.approx(150 / 110)


def test_idle_shares_of_measured_steps_are_beside_the_schedule_s() -> None:
    """Two steps of one microbatch on two stages; in the second, stage 1 begins a second late."""
    forward, backward = ["forward", 0], ["backward", 0]
    answers = [
        [
            [[*forward, 0.0, 1.0], [*backward, 4.0, 6.0]],
            [[*forward, 10.0, 11.0], [*backward, 15.0, 17.0]],
        ],
        [
            [[*forward, 1.0, 2.0], [*backward, 2.0, 4.0]],
            [[*forward, 12.0, 13.0], [*backward, 13.0, 15.0]],
        ],
    ]
    steps = pipeline.steps_of(answers)
    assert [len(spans) for spans in steps] == [4, 4]
    pairs = pipeline.compare("gpipe", 2, steps)
    measured = 1 - (3 / 6 + 3 / 7) / 2
    assert pairs == [pytest.approx((measured, 1 / 3))] * 2
