"""Snapshots are committed once each rank's backup holder has confirmed its copy; on all alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.comm.communicator import Communicator
from paceline.errors import CommError
from paceline.state.checkpoint_files import read_checkpoint
from tests.contract.test_step_snapshots import Rank, on_two, with_model
from tests.harness.equivalence.backup_members import BackupMembers
from tests.harness.equivalence.snapshot_ranks import first_difference
from tests.harness.equivalence.trainer_rollbacks import TrainerRollbacks


def test_nothing_is_committed_or_taken_anew_while_a_holder_has_not_confirmed() -> None:
    options, members = with_model(), BackupMembers()
    members.open.clear()

    def work(c: Communicator) -> None:
        rank = Rank(c, backup=members.join(f"start-{c.rank}"), **options)
        assert rank.train(5) == [(0,), (0, 1), (0, 1), (0, 1), (0, 1)]
        assert rank.snapshots.newest_committed is None
        members.open.set()
        rank.steps.take_snapshot()
        assert [name.step for name in rank.snapshots.held] == [5]
        assert rank.snapshots.newest_committed == rank.snapshots.held[0]
        (name,) = rank.snapshots.held
        member = f"start-{c.rank}"
        assert members.records[member].held[name].parts == {"start-0", "start-1"}
        assert set(rank.snapshots.commits.members(name)) == {"start-0", "start-1"}

    on_two(work)
    members.close()


def test_a_rank_that_has_promised_acknowledges_nothing_so_nothing_is_committed() -> None:
    options, members = with_model(), BackupMembers()

    def work(c: Communicator) -> None:
        rank = Rank(c, backup=members.join(f"start-{c.rank}"), **options)
        rank.steps.take_snapshot()
        committed = rank.snapshots.newest_committed
        if c.rank:
            members.records["start-1"].promise()
        rank.train(2)
        assert rank.snapshots.newest_committed == committed
        rank.steps.take_snapshot()

    with pytest.raises(CommError, match="generation of the world ends"):
        on_two(work)
    members.close()


def test_checkpoints_are_written_of_the_same_steps_as_without_backups(tmp_path: Path) -> None:
    flags = ("--sync", "allreduce", "--checkpoint_steps", "1", "--keep_checkpoints", "9")
    members = BackupMembers()
    runs = [
        TrainerRollbacks(tmp_path / "plain", flags, (1, 1)),
        TrainerRollbacks(tmp_path / "backed", flags, (1, 1), backups=members),
    ]
    (one, *_), (other, *_) = (run.run() for run in runs)
    members.close()
    assert all(torch.equal(one[key], value) for key, value in other.items())
    files = [sorted((run.folder / "checkpoints").glob("step-*.pt")) for run in runs]
    assert [file.name for file in files[0]] == [file.name for file in files[1]]
    for pair in zip(*files, strict=True):
        states = [read_checkpoint(file) for file in pair]
        for state in states:
            del state["position"]["snapshot_interval"], state["position"]["usage"]
        parts = ("model", "optimizer", "position")
        assert first_difference(*({part: of[part] for part in parts} for of in states)) == ""
