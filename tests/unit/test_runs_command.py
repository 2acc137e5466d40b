"""`paceline runs` and `paceline compare` tell runs apart by what is in their folders."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.observe.run_summary import log_rows
from tests.harness.library.finished_run import write_logged_run


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished run, and one that stopped after its first epoch; and what is no run."""
    monkeypatch.chdir(tmp_path)
    rows = [
        "10.0,10.0,500,500,20,50,0.5,0,0.1,1.5,0.75",
        "15.0,25.0,500,1000,40,50,0.5,1,0.1,1.25,0.625",
    ]
    write_logged_run(Path("runs/fast"), 0.5, rows, finished=True)
    write_logged_run(Path("runs/slow"), 0.25, rows[:1], finished=False)
    Path("runs/notes").mkdir()
    Path("runs/script/members").mkdir(parents=True)


def test_runs_have_their_progress_and_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "│" in line]
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    results = ["finished", "2/2", "1.2500", "75.00%", "0:25", "40"]
    cost = "0.5 processor hours, 0.0625 kWh, price 1.00"
    assert cells[0] == ["fast", "resnet20", *results, cost]
    assert cells[1][:3] == ["script", "a script's", "stopped, step 0"]
    stopped = ["stopped, step 20", "1/2", "1.5000", "75.00%", "0:10", "50"]
    assert cells[2] == ["slow", "resnet20", *stopped, cost.replace("1.00", "0.50")]
    assert main(["runs", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["run"] for one in found] == ["fast", "script", "slow"]
    assert (found[0]["accuracy"], found[0]["images_per_second"]) == (0.75, 40.0)
    assert found[0]["cost"]["processor_kwh"] == 0.0625
    assert found[1]["cost"] is None


def test_a_comparison_has_the_flags_that_differ_and_all_results(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["compare", "fast", "runs/slow", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["differences"] == {"base_learning_rate": [0.5, 0.25]}
    assert [one["state"] for one in found["runs"]] == ["finished", "stopped, step 20"]
    assert main(["compare", "fast", "slow"]) == 0
    text = capsys.readouterr().out
    assert "--base_learning_rate" in text
    assert "--model" not in text
    assert all(result in text for result in ("75.00%", "0:25", "0:10", "price 0.50"))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("runs --output_dir nowhere", "--output_dir nowhere: there is no run in it"),
        ("compare fast", "At least two runs are required"),
        ("compare fast script", "script: no step of this run is recorded: there is nothing to"),
        ("compare fast loop", "loop is the run of a script, and fast one of paceline train: they"),
        ("compare fast none", "none is neither a run folder nor the id of a run"),
    ],
)
def test_bad_input_is_a_sentence(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("runs/loop").mkdir()
    step = {"event": "step", "generation": 0, "step": 3}
    Path("runs/loop/events.a-0.jsonl").write_text(json.dumps(step) + "\n")
    assert main(words.split()) == 2
    assert sentence in capsys.readouterr().err


def test_of_an_epoch_in_two_logs_the_newer_row_counts(tmp_path: Path) -> None:
    for name, time, rows in (("b.log", 1, "0,3.0\n1,2.0\n"), ("a.log", 2, "1,1.0\n")):
        path = tmp_path / name
        path.write_text(f"# Namespace()\nepoch,loss\n{rows}")
        os.utime(path, (time, time))
    assert [row["loss"] for row in log_rows(tmp_path)] == ["3.0", "1.0"]
