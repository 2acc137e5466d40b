"""What a run cost, over a killed worker and a resume, beside what psutil reads of the processes."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from paceline.cli.main import main
from paceline.observe.cost.cost import Cost
from paceline.observe.last_state import last_state
from paceline.state.checkpoint_files import read_checkpoint
from tests.harness.processes.command import Command, kill, run
from tests.harness.processes.run_folders import (
    events,
    hold,
    release,
    wait_until_step,
    write_net,
)

EPOCHS, STEPS = 10, 4
WORDS = (
    *("train", "--train_data", "null", "--epoch_size", "24", "--image_size", "32"),
    *("--augment", "none", "--num_labels", "3", "--batch_size", "6", "--model", "net:plain"),
    *("--num_workers", "2", "--sync", "allreduce", "--price_per_hour", "7200"),
)


def used(command: Command) -> float:
    """Return the processor time of a command, of what it started, and of those that have ended."""
    family = [psutil.Process(command.pid), *command.family()]
    return sum(sum(process.cpu_times()[:4]) for process in family)


def cost_of(folder: Path) -> Cost:
    cost = last_state(folder).cost
    assert cost is not None
    return cost


def test_the_cost_is_that_of_all_starts_and_of_a_killed_worker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_net(tmp_path)
    hold(tmp_path, 4 * STEPS, 0.5)
    folder = tmp_path / "runs/r"
    command = Command(*WORDS, "--run_id", "r", "--num_epochs", str(EPOCHS), folder=tmp_path)
    wait_until_step(folder, STEPS, 0)
    (record,) = folder.glob("members/*-1.json")
    kill(psutil.Process(json.loads(record.read_text())["process"]["pid"]))
    wait_until_step(folder, 3 * STEPS, 1)
    began = time.monotonic()
    least = used(command)
    command.send(signal.SIGTERM)
    ended = command.wait()
    most = least + (os.cpu_count() or 1) * (time.monotonic() - began)
    assert ended.status == 143, ended.text
    release(tmp_path)
    first = cost_of(folder)
    assert least <= 3600 * first.processor_hours <= most
    ended = run(*WORDS, "--run_id", "r", "--num_epochs", str(EPOCHS), folder=tmp_path)
    assert ended.status == 0, ended.text
    cost = cost_of(folder)
    assert cost.processor_hours > first.processor_hours
    assert cost.price == pytest.approx(7200 * cost.machine_hours)
    assert f"Cost: {', '.join(cost.texts)}." in ended.text
    told = [event["processor_hours"] for event in events(folder) if event["event"] == "cost"]
    assert told == sorted(told)
    newest = max((folder / "checkpoints").glob("step-*.pt"))
    usage = read_checkpoint(newest)["position"]["usage"]
    assert len(usage) == 2  # one machine, in two starts
    assert sum(values[0] for values in usage.values()) / 3600 == pytest.approx(cost.processor_hours)

    # Another run that starts from a checkpoint hasn't paid for the steps before.
    words = (*WORDS, "--run_id", "other", "--resume", str(newest), "--num_epochs", str(EPOCHS + 1))
    ended = run(*words, folder=tmp_path)
    assert ended.status == 0, ended.text
    other = cost_of(tmp_path / "runs/other")
    assert 0 < other.machine_hours < cost.machine_hours
    newest = max((tmp_path / "runs/other/checkpoints").glob("step-*.pt"))
    assert len(read_checkpoint(newest)["position"]["usage"]) == 1
    assert main(["runs", "--output_dir", str(tmp_path / "runs"), "--json"]) == 0
    costs = [json.loads(line)["cost"] for line in capsys.readouterr().out.splitlines()]
    assert [one["processor_hours"] for one in costs] == [
        other.processor_hours,
        cost.processor_hours,
    ]
