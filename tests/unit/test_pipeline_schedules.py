"""The schedules of a pipeline: what each stage runs, and what must come before what."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import pytest

from paceline.api.argument_names import errors_name_arguments
from paceline.errors import ConfigError
from paceline.parallel import schedules
from paceline.parallel.schedules import (
    SCHEDULES,
    Schedule,
    Task,
    activations_alive,
    make_schedule,
)

KINDS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}
SIZES = [(stages, m) for stages in range(1, 7) for m in range(stages, 4 * stages + 1)]


def read(text: str) -> tuple[Task, ...]:
    """Read a row of a picture: "F0 B0"."""
    return tuple(Task(KINDS[word[0]], int(word[1:])) for word in text.split())  # type: ignore[arg-type]


def run_in_order(schedule: Schedule) -> Iterator[tuple[int, Task]]:
    """Run the stages' tasks in their order, each once what it receives is there; yield them."""
    done: set[tuple[int, str, int]] = set()
    positions = [0] * len(schedule)
    progress = True
    while progress:
        progress = False
        for stage, tasks in enumerate(schedule):
            while positions[stage] < len(tasks):
                task = tasks[positions[stage]]
                kind = task.kind
                before = stage - 1 if kind == "forward" else stage + 1
                received = kind == "backward_weight" or not 0 <= before < len(schedule)
                if not received and (before, kind, task.microbatch) not in done:
                    break
                done.add((stage, kind, task.microbatch))
                positions[stage] += 1
                progress = True
                yield stage, task


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_stage_passes_over_each_microbatch_once_in_each_direction(name: str) -> None:
    backward = ["backward_input", "backward_weight"] if name == "zb-h1" else ["backward"]
    for stages, microbatches in SIZES:
        each = Counter(
            Task(kind, m)  # type: ignore[arg-type]
            for kind in ["forward", *backward]
            for m in range(microbatches)
        )
        assert [Counter(tasks) for tasks in make_schedule(name, stages, microbatches)] == (
            [each] * stages
        )


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_stage_waits_for_ever_and_backward_follows_forward(name: str) -> None:
    for stages, microbatches in SIZES:
        schedule = make_schedule(name, stages, microbatches)
        order = list(run_in_order(schedule))
        assert len(order) == sum(map(len, schedule)), f"{stages} stages, {microbatches}: deadlock"
        for tasks in schedule:
            places = {task: place for place, task in enumerate(tasks)}
            for task in tasks:
                if task.kind != "forward":
                    assert places[Task("forward", task.microbatch)] < places[task]
                if task.kind == "backward_weight":
                    assert places[Task("backward_input", task.microbatch)] < places[task]


def test_microbatches_arrive_in_their_order() -> None:
    """So one channel with double buffers, first in, first out, is enough for each neighbour."""
    for make in SCHEDULES.values():
        for stages, microbatches in SIZES:
            for tasks in make(stages, microbatches):
                for kind in {task.kind for task in tasks}:
                    passes = [task.microbatch for task in tasks if task.kind == kind]
                    assert passes == list(range(microbatches))


def test_a_schedule_keeps_the_activations_of_so_many_microbatches() -> None:
    for stages, microbatches in SIZES:
        alive = {
            name: [activations_alive(tasks) for tasks in make(stages, microbatches)]
            for name, make in SCHEDULES.items()
        }
        assert alive["gpipe"] == [microbatches] * stages
        assert alive["1f1b"] == [stages - stage for stage in range(stages)]
        assert alive["zb-h1"] == [stages] * stages  # what 1F1B's first stage has: the paper's bound


def test_zb_h1_begins_no_more_microbatches_than_1f1b() -> None:
    """Until its input gradients are there, a microbatch's activations are whole."""
    for stages, microbatches in SIZES:
        for stage, tasks in enumerate(SCHEDULES["zb-h1"](stages, microbatches)):
            begun = 0
            for task in tasks:
                begun += (task.kind == "forward") - (task.kind == "backward_input")
                assert begun <= stages - stage


def test_the_pictures_of_the_documentation_are_what_the_functions_return() -> None:
    text = (schedules.__doc__ or "").split("    gpipe ")[1].split("\n\n")[0]
    rows = [match.group() for match in re.finditer(r"F0( +[FBIW]\d)+", text)]
    assert [read(row) for row in rows] == [
        SCHEDULES["gpipe"](3, 4)[0],
        *SCHEDULES["1f1b"](3, 4),
        *SCHEDULES["zb-h1"](3, 4),
    ]


def test_one_stage_has_one_process_s_order() -> None:
    assert SCHEDULES["gpipe"](1, 2) == (read("F0 F1 B0 B1"),)
    assert SCHEDULES["1f1b"](1, 2) == (read("F0 B0 F1 B1"),)
    assert SCHEDULES["zb-h1"](1, 2) == (read("F0 I0 W0 F1 I1 W1"),)


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "sentence"),
    [
        ("1f1b", 0, 4, "--stages 0: must be at least 1."),
        (
            "gpipe",
            4,
            3,
            "--microbatches 3: must be at least the number of stages, 4: with fewer, a stage is "
            "idle for 50% of a step (the bubble), or for longer; use 16 microbatches, with which "
            "it is 16%.",
        ),
        ("2f2b", 2, 4, "--schedule 2f2b: must be one of gpipe, 1f1b, zb-h1."),
    ],
)
def test_what_has_no_schedule_is_refused(
    name: str, stages: int, microbatches: int, sentence: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        make_schedule(name, stages, microbatches)
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    ("name", "microbatches", "sentence"),
    [("1f1b", 1, "microbatches 1: must be"), ("1F1B", 2, "schedule 1F1B: must be")],
)
def test_a_script_reads_of_arguments(name: str, microbatches: int, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused, errors_name_arguments():
        make_schedule(name, 2, microbatches)
    assert str(refused.value).startswith(sentence)
