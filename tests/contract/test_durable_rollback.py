"""A trainer whose members have lost a part of the state goes back to a checkpoint in its processes.

Of four members, 1 and 2 are lost: 2 is the backup holder of 1, whose part then has no holder.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paceline.cli import ledger
from paceline.errors import CheckpointError
from tests.harness.equivalence.backup_members import BackupMembers
from tests.harness.equivalence.trainer_breaks import ANY, Moment
from tests.harness.equivalence.trainer_rollbacks import (
    EPOCHS,
    FLOAT32,
    SAMPLES,
    STEPS,
    TrainerRollbacks,
)
from tests.harness.processes.run_folders import events

NOTIFIED = ("--sync", "notified", "--bucket_mb", "0.1", *FLOAT32)
CASES = {
    "sharded": (*NOTIFIED, "--update", "sharded"),
    "int8": (*NOTIFIED, "--wire", "int8"),
    "sharded int8": (*NOTIFIED, "--update", "sharded", "--wire", "int8"),
    "cosine": (
        *(*NOTIFIED, "--update", "sharded", "--lr_policy", "cosine", "--warmup_epochs", "1"),
        *("--shares", "measured"),
    ),
}
FOUR, LOST = (1, 1, 1, 1), (1, 2)
SCORES = ("input_count", "cumulative_input_count", "accuracy", "loss", "test_accuracy")


def run_with_losses(
    folder: Path, flags: tuple[str, ...], moments: list[list[Moment]], lost: list[tuple[int, ...]]
) -> tuple[TrainerRollbacks, torch.Tensor]:
    """Train with lost members; return the run, and the weights of those that are left."""
    backups = BackupMembers()
    run = TrainerRollbacks(folder, flags, FOUR, moments, lost, backups)
    states = run.run()
    backups.close()
    left = [flat(state) for rank, state in enumerate(states) if rank not in lost[-1]]
    assert all(torch.equal(one, left[0]) for one in left)
    return run, left[0]


def flat(state: object) -> torch.Tensor:
    assert isinstance(state, dict)
    return torch.cat([value.flatten() for value in state.values()])


def replayed(
    folder: Path,
    flags: tuple[str, ...],
    step: int,
    lost: tuple[int, ...],
    moment: str = "load",
) -> tuple[TrainerRollbacks, torch.Tensor]:
    """Train the same cuts undisturbed: members leave before a step, and hand over their parts."""
    run = TrainerRollbacks(folder, flags, FOUR, [[(step, moment)] * 4], [lost])
    states = run.run()
    assert run.starts == [step]
    return run, flat(states[next(rank for rank in range(4) if rank not in lost)])


def requires_ledger(run: TrainerRollbacks, capsys: pytest.CaptureFixture[str]) -> None:
    """Require that each sample counts once in each epoch, by the run's files."""
    capsys.readouterr()
    assert ledger.main([str(run.folder), "--json"]) == 0
    proof = json.loads(capsys.readouterr().out)
    assert [one["once"] for one in proof["accounts"]] == [SAMPLES] * EPOCHS
    assert [one["start"] for one in proof["generations"]] == [0, *run.starts]


def notes_of(run: TrainerRollbacks, rank: int = 0) -> list[str]:
    return [line["text"] for line in events(run.folder, rank) if line["event"] == "note"]


@pytest.mark.parametrize(
    ("name", "lost"), [*((name, LOST) for name in CASES), ("sharded", (0, 1))], ids=str
)
def test_the_others_train_the_same_bits_from_the_checkpoint_as_an_undisturbed_run(
    name: str, lost: tuple[int, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, expected = replayed(tmp_path / "plain", CASES[name], STEPS, lost)
    run, weights = run_with_losses(
        tmp_path / "run", CASES[name], [[(STEPS + 2, "backward")] * 4], [lost]
    )
    assert run.starts == [STEPS]
    assert run.from_disk == [True]
    assert run.recorded == {1}
    assert torch.equal(weights, expected)
    for one, row in zip(plain.rows, run.rows, strict=True):
        assert {key: one[key] for key in SCORES} == {key: row[key] for key in SCORES}
    requires_ledger(run, capsys)
    leader = min({0, 1, 2, 3} - {*lost})
    (note,) = (note for note in notes_of(run, leader) if note.startswith("The run went back"))
    file = run.folder / "checkpoints" / f"step-{STEPS:08}.pt"
    assert note == (
        f"The run went back from step 6 to step 4 of epoch 2, which is {file}: 24 samples are "
        "trained again."
    )


def test_a_machine_without_the_file_gets_it_from_another_one(tmp_path: Path) -> None:
    _, expected = replayed(tmp_path / "plain", CASES["sharded int8"], STEPS, LOST)
    backups = BackupMembers()
    moments: list[list[Moment]] = [[(STEPS + 2, "load")] * 4]
    run = TrainerRollbacks(
        tmp_path / "run", CASES["sharded int8"], FOUR, moments, [LOST], backups, apart=True
    )
    states = run.run()
    backups.close()
    assert run.from_disk == [True]
    assert all(torch.equal(flat(states[rank]), expected) for rank in (0, 3))


def test_a_run_without_a_checkpoint_goes_back_to_its_beginning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = CASES["sharded"]
    run, weights = run_with_losses(tmp_path / "run", flags, [[(3, "update")] * 4], [(0, 1, 2)])
    assert run.starts == [0]
    assert run.from_disk == [True]
    alone = TrainerRollbacks(tmp_path / "alone", flags, (1,))
    assert torch.equal(weights, flat(alone.run()[0]))
    for one, row in zip(alone.rows, run.rows, strict=True):
        assert {key: one[key] for key in SCORES} == {key: row[key] for key in SCORES}
    requires_ledger(run, capsys)
    texts = notes_of(run, 3)
    assert (
        "The run went back from step 3 to step 0 of epoch 1, which is the run's beginning: 36 "
        "samples are trained again." in texts
    )


def test_the_decided_state_counts_also_where_a_newer_file_and_another_epoch_are_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (*CASES["sharded"], "--checkpoint_steps", "3", "--keep_checkpoints", "9")
    plain, expected = replayed(tmp_path / "plain", flags, 3, LOST, "end")
    backups = BackupMembers()
    run = TrainerRollbacks(tmp_path / "run", flags, FOUR, [[(7, "forward")] * 4], [LOST], backups)
    run.announced = lambda path: path.name == "step-00000003.pt"
    states = run.run()
    backups.close()
    assert run.starts == [3]
    assert torch.equal(flat(states[0]), expected)
    assert [row["epoch"] for row in run.rows] == ["0", "1"]
    for one, row in zip(plain.rows, run.rows, strict=True):
        assert {key: one[key] for key in SCORES} == {key: row[key] for key in SCORES}
    requires_ledger(run, capsys)


@pytest.mark.parametrize(
    ("moment", "from_disk"),
    [((ANY, "entering"), True), ((ANY, "entered"), True), ((ANY, "load"), False)],
    ids=["entering", "entered", "the epoch's start is saved again"],
)
def test_a_loss_in_that_recovery_leads_back_to_the_same_checkpoint(
    moment: Moment, from_disk: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, moments = CASES["sharded int8"], [[(STEPS + 1, "end")] * 4, [moment] * 4]
    _, expected = replayed(tmp_path / "plain", flags, STEPS, (0, 1, 2))
    run, weights = run_with_losses(tmp_path / "run", flags, moments, [LOST, (0, 1, 2)])
    assert run.starts == [STEPS, STEPS]
    assert run.from_disk == [True, from_disk]
    assert torch.equal(weights, expected)
    requires_ledger(run, capsys)


def test_a_checkpoint_that_no_member_can_read_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    backups = BackupMembers()
    moments: list[list[Moment]] = [[(STEPS + 1, "load")] * 4]
    run = TrainerRollbacks(tmp_path / "run", CASES["sharded"], FOUR, moments, [LOST], backups)

    def lost(path: Path) -> bool:
        path.unlink()
        return True

    run.announced = lost
    with pytest.raises(CheckpointError, match="none of them can read the state after 4 steps"):
        run.run()
    backups.close()
    assert not run.recorded  # the next start resumes as if there had been no loss
