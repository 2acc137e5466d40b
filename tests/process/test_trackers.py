"""`paceline train --tracker tensorboard`: the curves of a stopped and resumed run are the run's."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest

from tests.harness.library.tracked_runs import curves, tensorboard_of
from tests.harness.processes.command import Command, run
from tests.harness.processes.run_folders import (
    events,
    hold,
    losses,
    release,
    wait_until,
    write_net,
)

EPOCHS, STEPS = 3, 10
WORDS = (
    *("train", "--train_data", "null", "--epoch_size", "60", "--test_data", "null"),
    *("--test_epoch_size", "8", "--image_size", "32", "--augment", "none", "--batch_size", "6"),
    *("--model", "net:plain", "--num_labels", "3", "--num_epochs", str(EPOCHS), "--run_id", "r"),
    *("--num_workers", "2", "--sync", "allreduce", "--checkpoint_steps", "2"),
    *("--tracker", "tensorboard"),
)


def trained(folder: Path, steps: int) -> bool:
    return any(
        event["event"] == "checkpoint" and event["step"] >= steps for event in events(folder)
    )


def test_a_stopped_and_resumed_run_has_one_value_a_step(tmp_path: Path) -> None:
    write_net(tmp_path)
    hold(tmp_path, 16, 0.5)
    folder = tmp_path / "runs/r"
    command = Command(*WORDS, folder=tmp_path)
    wait_until(partial(trained, folder, 12))
    command.send(signal.SIGINT)
    stopped = command.wait()
    assert stopped.status == 130, stopped.text
    assert "weren't all sent" not in stopped.text
    release(tmp_path)
    ended = run(*WORDS, folder=tmp_path)
    assert ended.status == 0, ended.text
    assert "tensorboard shows this run in runs/r/tensorboard." in ended.text

    read = tensorboard_of(folder)
    found, all_steps = curves(read), range(EPOCHS * STEPS)
    told = {step: values[-1] for step, values in losses(folder).items()}
    assert found["train/loss"] == pytest.approx(told)
    assert set(found["train/loss"]) == set(found["train/learning_rate"]) == set(all_steps)
    rows = [event for event in events(folder) if event["event"] == "epoch"]
    ends = {STEPS * (row["epoch"] + 1) - 1: row for row in rows}
    for tag, name in (("accuracy", "accuracy"), ("test_accuracy", "test_accuracy")):
        expected = {step: row[name] for step, row in ends.items()}
        assert found[f"epoch/{tag}"] == pytest.approx(expected)
    assert set(found["epoch/test_top5"]) == set(ends)
    assert found["step/sent_bytes"][all_steps[-1]] > 0
