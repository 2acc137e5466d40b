"""What a person sees, on a terminal and in a pipe."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.observe.console import Console, MachineConsole
from paceline.observe.progress_rate import ProgressRate, duration

RUN: dict[str, Any] = {
    "model": "resnet20",
    "world_size": 2,
    "machines": 1,
    "device": "cpu",
    "samples": 1280,
    "steps": 10,
    "epochs": 3,
}
EPOCH: dict[str, Any] = {
    "epoch": 0,
    "seconds": 4.0,
    "samples": 1280,
    "batches": 10,
    "loss": 1.5,
    "accuracy": 0.25,
    "learning_rate": 0.1,
}


@pytest.fixture(autouse=True)
def usual_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def step(
    console: Console, number: int, loss: float = 1.25, accuracy: float = 0.5, **more: float
) -> None:
    console.event(
        "step",
        generation=0,
        epoch=number // 10,
        step=number,
        epoch_step=number % 10,
        steps=10,
        samples=128,
        sums=[4 * loss, 4 * accuracy, 4.0, 4.0],
        learning_rate=0.1,
        **more,
    )


def log_of() -> Any:
    """Return a log without a row."""
    return SimpleNamespace(path=Path("runs/r/x.log"), recorded=-1)


def test_a_pipe_gets_a_line_every_ten_seconds_and_one_an_epoch() -> None:
    clock, file = Clock(), io.StringIO()
    console = Console(file, clock=clock, log=log_of())
    console.event("run", **RUN)
    for number in range(13):
        clock.now += 4.0
        step(console, number)
        if number == 9:
            clock.now += 100.0
            console.event("evaluate", step=0, steps=4)
            console.event("epoch", test_accuracy=None, **EPOCH)
    console.event("end")
    console.close()
    assert file.getvalue().splitlines() == [
        "Training resnet20: 2 workers on 1 machine (cpu), 1,280 images and 10 steps per epoch, "
        "3 epochs.",
        "Log: runs/r/x.log",
        "epoch 1/3, step 3/10, 1:48 left, 32 images/s, loss 1.250, accuracy 50.0%, lr 0.1",
        "epoch 1/3, step 6/10, 1:36 left, 32 images/s, loss 1.250, accuracy 50.0%, lr 0.1",
        "epoch 1/3, step 9/10, 1:24 left, 32 images/s, loss 1.250, accuracy 50.0%, lr 0.1",
        "evaluation, step 1/4",
        "epoch 1/3: 320 images/s, loss 1.500, accuracy 25.0%, lr 0.1, 0:04",
        "epoch 2/3, step 3/10, 3:30 left, 32 images/s, loss 1.250, accuracy 50.0%, lr 0.1",
        "Finished after 2:32.",
    ]


@pytest.mark.parametrize(("workers", "end"), [(2, "lr 0.1, 2.5 ms exposed"), (1, "lr 0.1")])
def test_what_the_exchange_was_waited_for_is_the_mean_since_the_last_look(
    workers: int, end: str
) -> None:
    clock, file = Clock(), io.StringIO()
    console = Console(file, clock=clock)
    console.event("run", **{**RUN, "world_size": workers})
    for number, exposed in enumerate((900.0, 1.0, 2.0, 4.5)):
        clock.now += 10.0 if number in (0, 3) else 0.0
        step(console, number, exposed_ms=exposed)
    assert file.getvalue().splitlines()[-1].endswith(end)


def test_a_loss_that_nobody_knows_yet_is_left_out() -> None:
    clock, file = Clock(), io.StringIO()
    console = Console(file, clock=clock)
    console.event("run", **RUN)
    clock.now += 10.0
    console.event(
        "step",
        epoch=0,
        step=0,
        epoch_step=0,
        steps=10,
        samples=128,
        learning_rate=0.1,
        sums=[0.0] * 5,
    )
    assert file.getvalue().splitlines()[-1] == "epoch 1/3, step 1/10, 13 images/s, lr 0.1"


def test_the_speed_of_a_resumed_epoch_counts_what_was_trained_since() -> None:
    clock, file = Clock(), io.StringIO()
    console = Console(file, clock=clock)
    console.event("run", **RUN)
    for number in (8, 9):
        step(console, number)
    console.event("epoch", test_accuracy=None, **EPOCH)
    assert file.getvalue().splitlines()[-1].startswith("epoch 1/3: 64 images/s, loss 1.500")


def test_an_epochs_line_says_how_many_bad_records_all_ranks_have_skipped() -> None:
    file = io.StringIO()
    console = Console(file)
    console.event("run", **RUN)
    console.event("epoch", test_accuracy=None, **{**EPOCH, "samples": 1277})
    console.event("epoch", test_accuracy=None, **{**EPOCH, "epoch": 1})
    bad, good = file.getvalue().splitlines()[-2:]
    assert "accuracy 25.0%, 3 bad records skipped, lr 0.1" in bad
    assert "skipped" not in good


def test_an_epoch_whose_line_was_shown_before_the_run_went_back_has_no_other() -> None:
    file, log = io.StringIO(), log_of()
    console = Console(file, log=log)
    console.event("run", **RUN)
    console.event("epoch", test_accuracy=None, **EPOCH)
    log.recorded = 0
    console.event("epoch", test_accuracy=None, **EPOCH)
    console.event("epoch", test_accuracy=None, **{**EPOCH, "epoch": 1})
    lines = [line.partition(",")[0] for line in file.getvalue().splitlines() if "loss" in line]
    assert lines == ["epoch 1/3: loss 1.500", "epoch 2/3: loss 1.500"]


def test_a_later_generation_is_not_told_as_a_new_run() -> None:
    clock, file = Clock(), io.StringIO()
    console = Console(file, clock=clock, started=clock.now - 60.0, log=log_of())
    console.event("run", **RUN, continued=True)
    clock.now += 5.0
    console.event("end")
    assert file.getvalue() == "Finished after 1:05.\n"


def test_the_end_names_the_best_epoch_and_the_weights() -> None:
    clock, file = Clock(), io.StringIO()
    console = Console(file, clock=clock)
    console.event("run", **RUN)
    written = file.tell()
    console.event("end", best=0.961, best_epoch=2, weights=["my runs/r/a.pt", "my runs/r/b.pt"])
    assert file.getvalue()[written:] == (
        "Finished after 0:00; best test accuracy 96.10% after epoch 3.\n"
        "Weights: my runs/r/a.pt, my runs/r/b.pt\n"
        "Model card: my runs/r/README.md\n"
        "Classify images: paceline predict 'my runs/r' IMAGE …\n"
        "More: paceline evaluate 'my runs/r', paceline export 'my runs/r', "
        "paceline plot 'my runs/r', paceline compare 'my runs/r' OTHER\n"
    )


def test_a_machine_without_the_leader_shows_a_line_an_epoch() -> None:
    file = io.StringIO()
    console = MachineConsole(1, 0, file)
    console.event("run", **RUN, labels=10)
    console.event("step", epoch_step=0)
    console.event("epoch", test_accuracy=0.5, top5=0.75, **EPOCH)
    console.event("note", text="for the leader's terminal")
    console.event("end", best=0.5, best_epoch=0, weights=[])
    console.close()
    assert file.getvalue().splitlines() == [
        "Training on machine 1 (resnet20, 3 epochs); machine 0 shows the steps.",
        "epoch 1/3: loss 1.500, accuracy 25.0%, test accuracy 50.00%, top-5 75.00%",
        "Finished.",
    ]


def test_a_terminal_is_drawn_at_most_five_times_a_second() -> None:
    clock, file = Clock(), io.StringIO()
    console = Console(file, terminal=True, width=120, clock=clock)
    console.event("run", **RUN)
    for number in range(10):
        clock.now += 0.125
        step(console, number)
    assert file.getvalue().count("images/s") == 5


def shown(output: str) -> list[str]:
    """Return what stands on a terminal after `output`, without colours."""
    letters = re.sub("\x1b\\[[0-9;]*m", "", output)
    return [line.rpartition("\r\x1b[2K")[2] for line in letters.split("\n")]


def test_on_a_terminal_the_epochs_line_takes_the_progress_lines_place() -> None:
    clock, file = Clock(), io.StringIO()
    console = Console(file, terminal=True, width=120, clock=clock)
    console.event("run", **RUN)
    for number in range(5):
        clock.now += 1.0
        step(console, number)
    assert shown(file.getvalue())[-1] == (
        "epoch 1/3  " + "━" * 12 + "─" * 12 + "  5/10  0:25 left  128 images/s  loss 1.250  "
        "accuracy 50.0%  lr 0.1"
    )
    console.event("evaluate", step=0, steps=4)
    console.event("epoch", test_accuracy=0.4321, top5=0.9, **EPOCH)
    console.event("note", text="a [bold]note[/bold]")
    console.close()
    assert shown(file.getvalue())[1:] == [
        "epoch 1/3: 160 images/s, loss 1.500, accuracy 25.0%, test accuracy 43.21%, "
        "top-5 90.00%, lr 0.1, 0:04",
        "a [bold]note[/bold]",
        "",
    ]


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (30, "epoch 1/3    1/10  128 images"),
        (80, "epoch 1/3  ━───────────  1/10  128 images/s  loss 1.250  accuracy 50.0%  lr 0.1"),
    ],
)
def test_a_progress_line_fits_the_terminal(width: int, line: str) -> None:
    clock, file = Clock(), io.StringIO()
    console = Console(file, terminal=True, width=width, clock=clock)
    console.event("run", **RUN)
    clock.now += 1.0
    step(console, 0)
    assert shown(file.getvalue())[-1] == line
    assert len(line) == width - 1


def test_closing_in_the_middle_of_an_epoch_leaves_the_terminal_at_the_start_of_a_line() -> None:
    clock, file = Clock(), io.StringIO()
    console = Console(file, terminal=True, width=100, clock=clock)
    console.event("run", **RUN)
    clock.now += 1.0
    step(console, 0)
    assert not file.getvalue().endswith("\n")
    console.close()
    console.close()
    assert file.getvalue().endswith("\n")
    assert "\x1b[?25l" not in file.getvalue()  # the cursor was never hidden


@pytest.mark.parametrize("terminal", [False, True])
def test_a_closed_pipe_ends_the_output_and_nothing_else(terminal: bool) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as file:
        clock = Clock()
        console = Console(file, terminal=terminal, width=100, clock=clock)
        console.event("run", **RUN)
        os.close(reader)
        for number in range(3):
            clock.now += 11.0
            step(console, number)
        console.event("epoch", test_accuracy=None, **EPOCH)
        console.close()


@pytest.mark.parametrize(("variable", "value"), [("TERM", "dumb"), ("FORCE_COLOR", "1")])
def test_nothing_is_drawn_over_where_that_cannot_work(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    clock, file = Clock(), io.StringIO()
    console = Console(file, terminal=True if variable == "TERM" else None, clock=clock)
    console.event("run", **RUN)
    clock.now += 10.0
    step(console, 0)
    assert shown(file.getvalue())[-2].startswith("epoch 1/3, step 1/10, ")
    assert "\r" not in file.getvalue()


def test_an_old_encoding_gets_a_bar_of_ascii() -> None:
    clock, raw = Clock(), io.BytesIO()
    with io.TextIOWrapper(raw, encoding="ascii") as file:
        console = Console(file, terminal=True, width=100, clock=clock)
        console.event("run", **RUN)
        clock.now += 1.0
        step(console, 4)
        assert b"############" in raw.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (754, "12:34"), (205_392, "57:03:12")]
)
def test_durations_are_written_like_a_clock(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_speed_is_that_of_the_last_seconds_without_the_evaluation() -> None:
    rate = ProgressRate(0.0)
    look: Callable[[float], float] = rate.samples_per_second
    rate.step(100, 1.0)
    assert look(1.0) == 100.0
    rate.step(300, 11.0)
    assert look(11.0) == 30.0  # 300 in the 10 seconds since the look before
    rate.pause(50.0)
    rate.step(10, 51.0)
    assert look(51.0) == 10.0


def test_time_left_is_known_from_the_second_step_on_and_counts_evaluations() -> None:
    rate = ProgressRate(0.0)
    assert rate.seconds_left(10, 5.0) is None
    rate.step(1, 100.0)  # starting up was slow
    assert rate.seconds_left(10, 100.0) is None
    rate.step(1, 102.0)
    assert rate.seconds_left(10, 102.0) == 20.0
    assert rate.seconds_left(10, 112.0) == 120.0


@pytest.mark.parametrize(("labels", "shown_top5"), [(4, False), (5, False), (6, True)])
def test_top5_is_shown_only_where_it_says_something(labels: int, shown_top5: bool) -> None:
    file = io.StringIO()
    console = Console(file, terminal=False)
    console.event("run", **RUN, labels=labels)
    console.event("epoch", test_accuracy=0.4321, top5=1.0, **EPOCH)
    assert ("top-5" in file.getvalue()) == shown_top5


def test_the_staleness_of_reads_is_a_mean_in_progress_and_a_histogram_in_an_epochs_line() -> None:
    clock, file = Clock(), io.StringIO()
    console = Console(file, clock=clock)
    console.event("run", **RUN)
    for number, staleness in enumerate((9.0, 0.5, 1.0, 2.0)):
        clock.now += 10.0 if number in (0, 3) else 0.0
        step(console, number, staleness=staleness)
    console.event("epoch", test_accuracy=None, staleness=[6, 3, 1], **EPOCH)
    progress, epoch = file.getvalue().splitlines()[-2:]
    assert progress.endswith("lr 0.1, staleness 1.2")
    assert ", staleness 0: 60%, 1: 30%, 2: 10%, lr 0.1" in epoch


def test_an_epochs_line_names_the_rank_that_held_others_back() -> None:
    file = io.StringIO()
    console = Console(file, terminal=False)
    console.event("run", **RUN)
    console.event("epoch", test_accuracy=None, straggler=(2, 12.34, 0.18, None), **EPOCH)
    assert ", rank 2 held others back for 12.3 s (18%), lr 0.1" in file.getvalue()
