"""`paceline plan` and the picture of a pipeline's spans."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from paceline.cli.main import main
from paceline.config.plan import ScheduleName
from paceline.parallel.schedule_picture import column_seconds, draw
from paceline.parallel.schedule_times import Link, Span, simulate
from paceline.parallel.schedules import SCHEDULES, Task

Plan = Callable[..., str]
EVEN = {"forward": 1.0, "backward": 2.0, "backward_input": 1.0, "backward_weight": 1.0}


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    def answer(words: str, status: int = 0) -> str:
        assert main(["plan", *words.split()]) == status
        said = capsys.readouterr()
        return said.err if status else said.out

    return answer


def picture(name: str, stages: int, microbatches: int, width: int) -> str:
    schedule = SCHEDULES[name](stages, microbatches)
    spans = simulate(schedule, [EVEN] * stages, [Link()] * stages)  # type: ignore[list-item]
    return "\n".join(draw(spans, column_seconds(spans, width)))


def test_a_schedule_is_drawn_like_this() -> None:
    assert picture("1f1b", 3, 4, 80) == (
        "F0 F1 F2 ............B0    F3 B1    ...B2    ...B3\n"
        "...F0 F1 ......B0    F2 B1    F3 B2    ...B3    ......\n"
        "......F0 B0    F1 B1    F2 B2    F3 B3    ............"
    )


def test_a_picture_fits_into_its_width() -> None:
    """The narrower it is, the less room have the numbers, and then the letters."""
    assert picture("zb-h1", 2, 3, 80) == (
        "F0 F1 ...I0 W0 F2 I1 W1 I2 W2\n...F0 I0 F1 I1 W0 F2 I2 W1 W2"
    )
    assert picture("zb-h1", 2, 3, 29) == "F0F1..I0W0F2I1W1I2W2\n..F0I0F1I1W0F2I2W1W2"
    assert picture("zb-h1", 2, 3, 19) == "FF.IWFIWIW\n.FIFIWFIWW"
    for width in range(1, 90):
        rows = picture("1f1b", 4, 12, width).splitlines()
        assert max(map(len, rows)) <= width
        assert len(rows) == 4


def test_spans_of_a_real_run_are_drawn_as_well() -> None:
    """They begin at any time, are of any length, and perhaps of some stages only."""
    spans = [
        Span(1, Task("forward", 0), 10.0, 10.21),
        Span(2, Task("forward", 0), 10.5, 10.73),
        Span(2, Task("backward_input", 0), 10.73, 10.7301),
        Span(1, Task("backward_weight", 0), 10.9, 11.0),
    ]
    assert draw(spans, column_seconds(spans, 20)) == [
        "F0  ..............W0",
        "..........F0   .....",
    ]


def test_the_stages_and_the_fastest_schedule_are_shown(plan: Plan) -> None:
    said = plan("--stages 2 --microbatches 4 --schedule 1f1b")
    assert said.splitlines()[:4] == [
        "1f1b: 15 ms a step, a bubble of 20.0%",
        "stage    idle  alive",
        "    0   20.0%      2  F0 F1 ......B0    F2 B1    F3 B2    ...B3",
        "    1   20.0%      1  ...F0 B0    F1 B1    F2 B2    F3 B3    ......",
    ]
    assert said.splitlines()[-1] == "Fastest: zb-h1, with 13 ms a step."


def test_of_two_that_are_equally_fast_the_one_with_fewer_activations_is_named(plan: Plan) -> None:
    said = plan("--stages 1 --microbatches 4")
    assert said.splitlines()[-1] == "Fastest: 1f1b, with 12 ms a step."


def test_stages_and_links_may_differ(plan: Plan) -> None:
    words = "--stages 3 --microbatches 3 --forward_ms 1 2 3 --backward_ms 4 --transfer_ms 5 6"
    (one,) = json.loads(plan(f"{words} --schedule gpipe --json"))["schedules"].values()
    assert one["activations_alive"] == [3, 3, 3]
    tasks = {(task["stage"], task["task"]): task["start_ms"] for task in one["tasks"]}
    assert tasks[1, "F0"] == pytest.approx(1 + 5)
    assert tasks[2, "F0"] == pytest.approx(8 + 6)
    assert tasks[2, "B0"] == pytest.approx(14 + 6 + 6 + 3)  # the link carries one in 6 ms
    assert one["step_ms"] == pytest.approx(29 + 4 + 6 + 6 + 6 + 4 + 5 + 4)


def test_the_result_is_json(plan: Plan) -> None:
    result = json.loads(plan("--stages 2 --microbatches 2 --weight_ms 0.5 --json"))
    assert list(result["schedules"]) == list(SCHEDULES)
    assert result["best"] == "zb-h1"
    one = result["schedules"]["zb-h1"]
    assert one["step_ms"] == 2 * 3 + (1 + 1.5 - 0.5)
    assert one["idle"] == pytest.approx([2 / 8] * 2)
    assert one["tasks"][0] == {"stage": 0, "task": "F0", "start_ms": 0, "end_ms": 1}


def test_the_flag_has_the_names_of_the_schedules() -> None:
    assert list(ScheduleName.__args__) == list(SCHEDULES)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--stages 0", "--stages 0: must be at least 1."),
        ("--stages 4 --microbatches 3", "--microbatches 3: must be at least the number of stages"),
        ("--stages 2 --microbatches 60000", "--microbatches 60000: a step of 120,000 forward"),
        ("--stages 3 --forward_ms 1 2", "--forward_ms 1 2: give one value, or 3: there"),
        ("--stages 3 --transfer_ms 1 2 3", "--transfer_ms 1 2 3: give one value, or 2: there"),
        ("--stages 2 --forward_ms 0", "--forward_ms 0.0: must be greater than 0"),
        ("--stages 2 --backward_ms 1 nan", "--backward_ms nan: must be greater than 0"),
        ("--stages 2 --weight_ms 2", "--weight_ms 2.0: must be at least 0 and less than 2.0"),
        ("--stages 2 --transfer_ms -1", "--transfer_ms -1.0: must be at least 0"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_a_sentence(
    words: str, sentence: str, plan: Plan
) -> None:
    assert plan(words, status=2).startswith(f"paceline: {sentence}")
