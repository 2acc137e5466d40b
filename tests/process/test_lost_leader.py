"""Rank 0 of `paceline train` is killed: another worker becomes rank 0 and writes its files."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from paceline.cluster.environment import WORKER_VARIABLE
from paceline.state.checkpoint_files import read_checkpoint
from tests.harness.processes.command import Command, rows_of
from tests.harness.processes.fork_server import environment_of
from tests.harness.processes.run_folders import (
    event_files,
    events,
    hold,
    release,
    wait_until_step,
    write_net,
)

STEPS, EPOCHS = 12, 3
TRAIN = (
    *("train", "--train_data", "null", "--test_data", "null", "--epoch_size", "72"),
    *("--test_epoch_size", "10", "--image_size", "32", "--augment", "none"),
    *("--num_labels", "3", "--batch_size", "6", "--run_id", "r", "--model", "net:plain"),
    *("--sync", "allreduce", "--num_workers", "2", "--num_epochs", str(EPOCHS)),
)


def test_the_next_rank_0_writes_what_the_killed_one_wrote(tmp_path: Path) -> None:
    write_net(tmp_path)
    hold(tmp_path, STEPS + 5)
    run = tmp_path / "runs" / "r"
    command = Command(*TRAIN, folder=tmp_path)
    wait_until_step(run, STEPS + 2, 0)
    (leader,) = (
        one
        for one in command.family()
        if json.loads(environment_of(one)[WORKER_VARIABLE])["local_rank"] == 0
    )
    leader.kill()
    release(tmp_path)
    ended = command.wait()
    assert ended.status == 0, ended.text
    assert [int(row["epoch"]) for row in rows_of(run)] == list(range(EPOCHS))
    assert int(rows_of(run)[-1]["cumulative_batch_count"]) == EPOCHS * STEPS
    for epoch in range(EPOCHS):
        assert ended.text.count(f"epoch {epoch + 1}/{EPOCHS}: ") == 1, ended.text
    lost, other = events(run, 0), events(run, 1)
    losses = [line["step"] for line in (*lost, *other) if line["event"] == "loss"]
    assert set(losses) == set(range(EPOCHS * STEPS))
    assert event_files(run, 1) != event_files(run, 0)
    saved = read_checkpoint(max((run / "checkpoints").glob("step-*.pt")))
    assert saved["position"]["number"] == EPOCHS * STEPS
    assert saved["position"]["generation"] == 1
    assert int((run / "generation").read_text()) == 1
    (weights,) = (path for path in run.glob("*.pt") if "_best" not in path.name)
    state = torch.load(weights, weights_only=True)
    assert all(torch.equal(value, saved["model"][name]) for name, value in state.items())
