"""A trainer whose members have parts of each snapshot continues from memory, or from the disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paceline.cli import ledger
from tests.harness.equivalence.backup_members import BackupMembers
from tests.harness.equivalence.large_batch import largest_difference
from tests.harness.equivalence.trainer_breaks import ANY, Moment, drawn
from tests.harness.equivalence.trainer_rollbacks import (
    EPOCHS,
    FLOAT32,
    FLOAT64,
    SAMPLES,
    STEPS,
    TrainerRollbacks,
)
from tests.harness.equivalence.undisturbed_runs import undisturbed
from tests.harness.processes.run_folders import events

NOTIFIED = ("--sync", "notified", "--bucket_mb", "0.1")
DIVIDED = ("--snapshot_copies", "divided")
FOUR = (1, 1, 1, 1)


def requires_ledger(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Require that each sample counts once in each epoch."""
    capsys.readouterr()
    assert ledger.main([str(folder), "--json"]) == 0
    proof = json.loads(capsys.readouterr().out)
    assert [one["once"] for one in proof["accounts"]] == [SAMPLES] * EPOCHS


def test_one_member_after_another_is_lost_and_the_others_continue_from_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (*NOTIFIED, *FLOAT64)
    plain = undisturbed(flags, FOUR)
    backups = BackupMembers(prompt=True)
    moments = [*drawn(4, [3], 4), [(ANY, "load")] * 4]
    run = TrainerRollbacks(
        tmp_path / "run", (*flags, *DIVIDED), FOUR, moments, [(1,), (1, 3)], backups
    )
    states = run.run()
    backups.close()
    assert run.from_disk == [False, False]
    assert all(torch.equal(states[0][key], value) for key, value in states[2].items())
    assert largest_difference(states[0], plain.states[0]) < 1e-10
    requires_ledger(run.folder, capsys)
    notes = [line["text"] for line in events(run.folder, 0) if line["event"] == "note"]
    assert len([note for note in notes if "divided among the 4 processes" in note]) == 1
    assert len([note for note in notes if note.startswith("The parts of the snapshot, 0.")]) == 2


def test_each_parameter_is_on_two_of_four_members(tmp_path: Path) -> None:
    backups = BackupMembers(prompt=True)
    moments: list[list[Moment]] = [[(7, "backward")] * 4]
    flags = (*NOTIFIED, *FLOAT64, *DIVIDED)
    run = TrainerRollbacks(tmp_path / "run", flags, FOUR, moments, [(0,)], backups)
    shares = {}

    def note_shares(*_: object) -> None:
        for rank, snapshots in run._snapshots.items():
            state = snapshots._snapshots.state(snapshots.held[-1])
            names = set(state["parameters"])
            shares[rank] = sum(p.numel() for p in state["parameters"].values())
            assert set(state["optimizer"]) == names

    recover = run._recover

    def recovered(c: object, backups: BackupMembers, number: int) -> object:
        if getattr(c, "rank", None) == 0:
            note_shares()
        return recover(c, backups, number)  # type: ignore[arg-type]

    run._recover = recovered  # type: ignore[method-assign,assignment]
    states = run.run()
    backups.close()
    whole = sum(value.numel() for name, value in states[1].items() if "running" not in name)
    assert len(shares) == 4
    assert sum(shares.values()) == 2 * whole


def test_the_loss_of_both_that_have_a_part_leads_back_to_a_checkpoint_that_is_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Member 2 is the holder of member 1."""
    flags = (*NOTIFIED, *FLOAT32)
    backups = BackupMembers()
    run = TrainerRollbacks(
        tmp_path / "run",
        (*flags, *DIVIDED),
        FOUR,
        [[(STEPS + 2, "backward")] * 4],
        [(1, 2)],
        backups,
    )
    states = run.run()
    backups.close()
    assert run.from_disk == [True]
    assert run.starts == [STEPS]
    # The same cuts, by whole snapshots, of which any member can continue alone.
    again = TrainerRollbacks(tmp_path / "again", flags, FOUR, [[(STEPS, "load")] * 4], [(1, 2)])
    expected = again.run()
    assert again.starts == [STEPS]
    for rank in (0, 3):
        assert all(torch.equal(expected[0][key], value) for key, value in states[rank].items())
    requires_ledger(run.folder, capsys)
