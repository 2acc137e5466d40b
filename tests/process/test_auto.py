"""`--sync auto`, the default: a run of two workers measures, chooses, says so, and remembers."""

from __future__ import annotations

import re
import signal
import tomllib
from pathlib import Path

from tests.harness.processes.command import Command, run
from tests.harness.processes.launcher_commands import Script
from tests.harness.processes.run_folders import events, write_net

TRAIN = (
    *("train", "--train_data", "null", "--epoch_size", "70", "--image_size", "32"),
    *("--augment", "none", "--num_labels", "3", "--batch_size", "6", "--run_id", "r"),
    *("--model", "net:plain", "--num_workers", "2"),
)
SCRIPT = (
    "-m",
    "tests.harness.library.library_script",
    "run",
    "--sync",
    "auto",
    "--epochs",
    "100000",
)
CHOSEN = re.compile(
    r"exchange: (allreduce|notified), (\d+) MB buckets: \S+ ms per step; .*\. Pin this choice with "
    r"--sync \1 --bucket_mb \2\.$"
)


def test_a_run_chooses_by_its_first_steps_and_goes_on_with_that(tmp_path: Path) -> None:
    write_net(tmp_path)
    words = (*TRAIN, "--num_epochs", "100000")
    first = Command(*words, folder=tmp_path)
    said = CHOSEN.search(first.line_with("Pin this choice").rstrip())
    assert said is not None
    end(first)
    kept = tomllib.loads((tmp_path / "runs/r/exchange.toml").read_text())
    assert (kept["sync"], kept["bucket_mb"]) == (said[1], float(said[2]))
    assert kept["machines"] == [2]
    assert set(kept["milliseconds"]) == {"notified 16 MB", "allreduce 8 MB"}

    (predicted, _) = (
        event
        for rank in range(2)
        for event in events(tmp_path / "runs/r", rank)
        if event["event"] == "predicted"
    )
    assert set(predicted["milliseconds"]) == {"notified 16 MB", "allreduce 8 MB"}
    assert predicted["exchange"] in predicted["milliseconds"]

    again = Command(*words, folder=tmp_path)
    line = again.line_with("exchange: ").rstrip()
    what = f"exchange: {said[1]}, {said[2]} MB buckets"
    assert line == f"{what}, reused from this run's earlier start (exchange.toml)."
    end(again)


def test_a_run_whose_workers_take_turns_to_be_slow_proposes_a_server(tmp_path: Path) -> None:
    write_net(tmp_path)
    words = ("--model", "net:turns", "--batch_size", "24", "--epoch_size", "1440")
    command = Command(*TRAIN, *words, "--num_epochs", "100000", folder=tmp_path)
    line = command.line_with("take turns to be slow")
    assert re.search(r": --sync server --staleness 2 would train about 1\.\d times as fast", line)
    end(command)


def end(command: Command) -> None:
    command.send(signal.SIGTERM)
    ended = command.wait()
    assert ended.status == 143, ended.text
    assert "Traceback" not in ended.text


def test_a_short_run_takes_collectives_and_says_so(tmp_path: Path) -> None:
    write_net(tmp_path)
    ended = run(*TRAIN, "--num_epochs", "1", folder=tmp_path)
    assert ended.status == 0, ended.text
    assert (
        "exchange: allreduce, 8 MB buckets: 12 steps are too few for autotuning; set --sync and "
        "--bucket_mb to override.\n"
    ) in ended.text
    assert not (tmp_path / "runs/r/exchange.toml").exists()


def test_a_script_chooses_by_its_first_steps(tmp_path: Path) -> None:
    script = Script("paceline", *SCRIPT, folder=tmp_path)
    line = script.line_with("Pin this choice").rstrip()  # not the proposal of a server
    said = re.fullmatch(
        r"paceline: exchange: (\w+), \d+ MB buckets: .*\. "
        r"Pin this choice with sync \1 bucket_mb \d+\.",
        line,
    )
    assert said is not None, line
    assert tomllib.loads((tmp_path / "run/exchange.toml").read_text())["sync"] == said[1]
    script.kill_all()
    script.wait()
