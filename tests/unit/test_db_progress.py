"""Progress on a terminal and in a pipe."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from paceline.cli.progress import meter


def test_in_a_pipe_there_is_a_line_at_the_start_every_ten_seconds_and_at_the_end() -> None:
    out, now = io.StringIO(), 0.0
    with meter("Writing", "images", Console(file=out), clock=lambda: now) as show:
        for done in range(1, 4001):
            now = done / 100
            show(done, 4000)
    assert out.getvalue().splitlines() == [
        "Writing: 1 of 4,000 images",
        "Writing: 1,001 of 4,000 images, 100/s, 0:00:30 left",
        "Writing: 2,001 of 4,000 images, 100/s, 0:00:20 left",
        "Writing: 3,001 of 4,000 images, 100/s, 0:00:10 left",
        "Writing: 4,000 of 4,000 images, 100/s, 0:00:00 left",
    ]


def test_on_a_terminal_there_is_a_bar_that_ends_full() -> None:
    out, now = io.StringIO(), 0.0
    console = Console(file=out, force_terminal=True, width=100)
    with meter("Writing", "images", console, clock=lambda: now) as show:
        for done in range(1, 101):
            now = done / 100
            show(done, 100)
    text = out.getvalue()
    assert "100/100" in text
    assert "100%" in text
    assert "100 images/s" in text


def test_results_that_go_elsewhere_stay_out_of_the_bars_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = io.StringIO()
    with meter("Predicting", "images", Console(file=out, force_terminal=True)) as show:
        print('{"image": "a.jpg"}')
        show(1, 1)
    assert capsys.readouterr().out == '{"image": "a.jpg"}\n'
    assert "a.jpg" not in out.getvalue()
