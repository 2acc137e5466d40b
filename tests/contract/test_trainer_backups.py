"""What a lost member alone owned comes from its backup holder's copy, bit for bit."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from paceline.cli import ledger
from tests.harness.equivalence.backup_members import BackupMembers
from tests.harness.equivalence.large_batch import largest_difference
from tests.harness.equivalence.snapshot_ranks import first_difference
from tests.harness.equivalence.trainer_breaks import ANY, Moment, drawn
from tests.harness.equivalence.trainer_rollbacks import (
    EPOCHS,
    FLOAT32,
    FLOAT64,
    SAMPLES,
    TrainerRollbacks,
)
from tests.harness.equivalence.undisturbed_runs import undisturbed

NOTIFIED = ("--sync", "notified", "--bucket_mb", "0.1")
SHARDED = (*NOTIFIED, "--update", "sharded")
DIVIDED = ("--snapshot_copies", "divided")
CASES = {
    "allreduce": ("--sync", "allreduce", *FLOAT64),
    "notified": (*NOTIFIED, *FLOAT64),
    "sharded": (*SHARDED, *FLOAT64),
    "divided allreduce": ("--sync", "allreduce", *FLOAT64, *DIVIDED),
    "divided notified": (*NOTIFIED, *FLOAT64, *DIVIDED),
    "divided sharded": (*SHARDED, *FLOAT64, *DIVIDED),
    "int8": (*NOTIFIED, *FLOAT32, "--wire", "int8"),
    "sharded int8": (*SHARDED, *FLOAT32, "--wire", "int8"),
}
LOSSY = {"int8": 1e-3, "sharded int8": 1e-3}


@pytest.mark.parametrize("lost", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_a_trainer_continues_with_the_copy_of_a_lost_members_part(
    name: str, lost: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = undisturbed(CASES[name], (1, 1, 1))
    backups = BackupMembers()
    run = TrainerRollbacks(
        tmp_path / "run", CASES[name], (1, 1, 1), drawn(4, [3], 3), [(lost,)], backups
    )
    states = run.run()
    backups.close()
    ((own, copied),) = run.restored
    assert not first_difference(asdict(own), asdict(copied))
    present = [state for rank, state in enumerate(states) if rank != lost]
    assert all(torch.equal(present[0][key], value) for key, value in present[1].items())
    assert largest_difference(present[0], plain.states[0]) < LOSSY.get(name, 1e-10)
    if name == "notified":
        assert max(backups.delivered) < 500  # bytes: the sums of a step that weren't received
    capsys.readouterr()
    assert ledger.main([str(run.folder), "--json"]) == 0
    proof = json.loads(capsys.readouterr().out)
    assert [one["once"] for one in proof["accounts"]] == [SAMPLES] * EPOCHS


@pytest.mark.parametrize(
    ("moments", "lost"),
    [
        (drawn(4, [3], 3), [(1, 2)]),
        (drawn(5, [1], 3), [(0, 1)]),
        ([*drawn(4, [3], 3), [(ANY, "entering")] * 3], [(2,), (1, 2)]),
        ([*drawn(4, [3], 3), [(ANY, "entered")] * 3], [(1,), (1, 2)]),
        ([*drawn(4, [3], 3), [(ANY, "load")] * 3], [(2,), (0, 2)]),
    ],
    ids=["holder and owner", "leader and holder", "entering", "entered", "no commit yet"],
)
@pytest.mark.parametrize("name", ["allreduce", "notified"])
def test_one_member_alone_continues_where_no_rank_has_state_of_its_own(
    name: str,
    moments: list[list[Moment]],
    lost: list[tuple[int, ...]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = undisturbed(CASES[name], (1, 1, 1))
    backups = BackupMembers()
    run = TrainerRollbacks(tmp_path / "run", CASES[name], (1, 1, 1), moments, lost, backups)
    states = run.run()
    backups.close()
    (left,) = {0, 1, 2} - {*lost[-1]}
    assert largest_difference(states[left], plain.states[0]) < 1e-10
    for one, row in zip(plain.rows, run.rows, strict=True):
        for key in ("input_count", "loss", "accuracy"):
            assert float(row[key]) == pytest.approx(float(one[key]), rel=1e-7)
    capsys.readouterr()
    assert ledger.main([str(run.folder), "--json"]) == 0
    proof = json.loads(capsys.readouterr().out)
    assert [one["once"] for one in proof["accounts"]] == [SAMPLES] * EPOCHS


@pytest.mark.parametrize("name", ["sharded", "int8"])
def test_a_second_loss_after_an_uncommitted_start_goes_back_to_the_committed_one(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Member 2 alone has its part of the first start; of the older one, member 3 has a copy."""
    machines = (1, 1, 1, 1)
    plain = undisturbed(CASES[name], machines)
    backups = BackupMembers(
        withheld=lambda at, owner: at.step == 5 and owner == "start-2", prompt=True
    )
    moments: list[list[Moment]] = [[(7, "backward")] * 4, [(ANY, "entering")] * 4]
    run = TrainerRollbacks(
        tmp_path / "run", CASES[name], machines, moments, [(0,), (0, 2)], backups
    )
    states = run.run()
    backups.close()
    assert run.from_disk == [False, False]
    assert run.starts == [5, 4]
    assert all(torch.equal(states[1][key], value) for key, value in states[3].items())
    assert largest_difference(states[1], plain.states[0]) < LOSSY.get(name, 1e-10)
    capsys.readouterr()
    assert ledger.main([str(run.folder), "--json"]) == 0
    proof = json.loads(capsys.readouterr().out)
    assert [one["once"] for one in proof["accounts"]] == [SAMPLES] * EPOCHS
