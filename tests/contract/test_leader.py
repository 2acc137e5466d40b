"""A member that becomes rank 0 takes over log, console, losses, weights and checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.observe.csv_log import COLUMNS
from paceline.state.checkpoint_files import read_checkpoint
from tests.harness.equivalence.trainer_breaks import Moment
from tests.harness.equivalence.trainer_rollbacks import EPOCHS, FLOAT64, STEPS, TrainerRollbacks
from tests.harness.processes.run_folders import events

FLAGS = ("--sync", "allreduce", *FLOAT64, "--checkpoint_steps", "3", "--keep_checkpoints", "2")
IN_SECOND_EPOCH: list[list[Moment]] = [[(STEPS + 1, "update")] * 2]


def weights_in(folder: Path) -> Path:
    """Return the file of the last epoch's weights."""
    (file,) = (p for p in folder.glob("*.pt") if p.name != "start.pt" and "_best" not in p.name)
    return file


def lost_leader(
    folder: Path, moments: list[list[Moment]] = IN_SECOND_EPOCH, *, apart: bool
) -> tuple[TrainerRollbacks, dict[str, torch.Tensor]]:
    """Train on two machines until the first member is lost, and then on the other one.

    Returns:
        the training, and the second member's weights.
    """
    training = TrainerRollbacks(folder, FLAGS, (1, 1), moments, [(0,)], apart=apart)
    return training, dict(training.run()[1])


def epochs_in(folder: Path) -> list[int]:
    """Return the epochs of the log's rows; the file has both lines before them."""
    (log,) = folder.glob("*.log")
    comment, header, *rows = log.read_text().splitlines()
    assert comment.startswith("# Namespace(")
    assert header == ",".join(COLUMNS)
    return [int(row.split(",")[list(COLUMNS).index("epoch")]) for row in rows]


def losses(folder: Path, member: int) -> list[int]:
    """Return the steps whose losses a member recorded."""
    return [line["step"] for line in events(folder, member) if line["event"] == "loss"]


def test_in_a_shared_folder_the_next_leader_continues_all_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training, weights = lost_leader(tmp_path / "run", apart=False)
    lines = capsys.readouterr().out.splitlines()
    (start,), steps = training.starts, EPOCHS * STEPS
    assert epochs_in(training.folder) == list(range(EPOCHS))
    totals = [int(row["cumulative_batch_count"]) for row in training.rows]
    assert totals == [STEPS * (epoch + 1) for epoch in range(EPOCHS)]
    assert losses(training.folder, 1)[-1] == steps - 1
    assert max(losses(training.folder, 0)) <= STEPS + 1
    assert set(range(steps)) == {*losses(training.folder, 0), *losses(training.folder, 1)}
    for epoch in range(EPOCHS):
        shown = [line for line in lines if f"epoch {epoch + 1}/{EPOCHS}: " in line]
        assert sum(", lr " in line for line in shown) == 1  # the other machine's line has none
    assert [line for line in lines if "Training normed: 1 worker on 1 machine" in line]
    saved = read_checkpoint(training.folder / "checkpoints" / f"step-{steps:08}.pt")
    assert saved["position"]["generation"] == 1
    assert [one[1] for one in saved["lineage"]] == [0, start]
    file = weights_in(training.folder)
    written = torch.load(file, weights_only=True)
    assert all(torch.equal(written[name], value) for name, value in weights.items())
    files = sorted(file.name for file in (training.folder / "checkpoints").glob("step-*.pt"))
    assert files == [f"step-{step:08}.pt" for step in (6, 8)]


def test_in_its_own_folder_the_next_leader_begins_the_files(tmp_path: Path) -> None:
    training, weights = lost_leader(tmp_path / "run", apart=True)
    first, second = (training.folder_of(machine) for machine in range(2))
    assert epochs_in(first) == [0]
    assert epochs_in(second) == [1]
    (log,) = second.glob("*.log")
    row = dict(zip(COLUMNS, log.read_text().splitlines()[-1].split(","), strict=True))
    assert int(row["cumulative_batch_count"]) == 2 * STEPS
    files = [
        sorted(file.name for file in one.glob("checkpoints/step-*.pt")) for one in (first, second)
    ]
    assert files == [
        [f"step-{step:08}.pt" for step in (3, 4)],
        [f"step-{step:08}.pt" for step in (6, 8)],
    ]
    file = weights_in(second)
    written = torch.load(file, weights_only=True)
    assert all(torch.equal(written[name], value) for name, value in weights.items())


def test_a_member_that_is_not_the_leader_writes_its_events_alone(tmp_path: Path) -> None:
    training = TrainerRollbacks(tmp_path / "run", FLAGS, (1, 1), apart=True)
    training.run()
    assert [file.name.split(".")[0] for file in training.folder_of(1).iterdir()] == ["events"]


def test_what_a_lost_leader_did_not_save_of_an_epoch_is_saved(tmp_path: Path) -> None:
    end: list[list[Moment]] = [[(EPOCHS * STEPS, "finish")] * 2]
    training, weights = lost_leader(tmp_path / "run", end, apart=True)
    second = training.folder_of(1)
    file = weights_in(second)
    written = torch.load(file, weights_only=True)
    assert all(torch.equal(written[name], value) for name, value in weights.items())
    assert (second / "checkpoints" / f"step-{EPOCHS * STEPS:08}.pt").exists()
