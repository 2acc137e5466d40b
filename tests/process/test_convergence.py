"""A run that ends at convergence: at the epoch that its accuracies say, also over a kill."""

from __future__ import annotations

from pathlib import Path

from paceline.state.checkpoint_files import read_checkpoint
from tests.harness.equivalence.snapshot_ranks import first_difference
from tests.harness.processes.command import Command, rows_of, run
from tests.harness.processes.run_folders import (
    events,
    hold,
    release,
    wait_until_step,
    write_net,
)

EPOCHS, STEPS = 8, 4
WORDS = (
    *("train", "--train_data", "null", "--test_data", "null", "--epoch_size", "24"),
    *("--test_epoch_size", "10", "--image_size", "32", "--augment", "none", "--num_labels", "3"),
    *("--batch_size", "6", "--model", "net:dropout", "--num_epochs", str(EPOCHS)),
    *("--num_workers", "2", "--sync", "allreduce", "--keep_checkpoints", str(EPOCHS)),
)


def accuracies(folder: Path) -> list[float]:
    return [float(row["test_accuracy"]) for row in rows_of(folder)]


def test_patience_ends_a_killed_run_where_it_ends_an_undisturbed_one(tmp_path: Path) -> None:
    write_net(tmp_path)
    whole = tmp_path / "runs/whole"
    ended = run(*WORDS, "--run_id", "whole", folder=tmp_path)
    assert ended.status == 0, ended.text
    known = accuracies(whole)
    last = next(epoch for epoch in range(1, EPOCHS) if known[epoch] <= max(known[:epoch])) + 1
    assert 2 <= last < EPOCHS
    reason = f"1 evaluation after epoch {last - 1} had no better test accuracy than its "

    folder = tmp_path / "runs/r"
    patient = (*WORDS, "--run_id", "r", "--patience", "1")
    hold(tmp_path, STEPS * last - 1)
    killed = Command(*patient, folder=tmp_path)
    wait_until_step(folder, STEPS * (last - 1) + 1, 0)
    killed.kill_all()
    killed.wait()
    release(tmp_path)
    ended = run(*patient, folder=tmp_path)
    assert ended.status == 0, ended.text
    assert ended.text.count(f"The run ends after {last} epochs: {reason}") == 1
    assert accuracies(folder) == known[:last]
    for rank in (0, 1):
        assert events(folder, rank)[-1]["reason"].startswith(reason)
    require_same(folder, whole, STEPS * last)

    ended = run(*patient, folder=tmp_path)
    assert ended.status == 0, ended.text
    assert f"run r is finished: {reason}" in ended.text
    assert "(--patience 1); raise that flag, or leave it out, to continue the run" in ended.text
    ended = run(*WORDS, "--run_id", "r", "--target_accuracy", "1", folder=tmp_path)
    assert ended.status == 0, ended.text
    assert accuracies(folder) == known
    require_same(folder, whole, STEPS * EPOCHS)


def require_same(one: Path, other: Path, step: int) -> None:
    name = f"checkpoints/step-{step:08}.pt"
    first, second = (read_checkpoint(folder / name) for folder in (one, other))
    for entry in ("model", "optimizer"):
        assert first_difference(first[entry], second[entry]) == ""
