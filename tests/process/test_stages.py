"""Stages of a mesh, as processes: the ledger counts replicas, and each stage trains exactly."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.library.stage_script import EPOCHS, STAGES, trained_alone
from tests.harness.processes.fault_runs import EXACT, distance, load, proof_of
from tests.harness.processes.launcher_commands import run

SCRIPT = ("-m", "tests.harness.library.stage_script")
SAMPLES = 50


def require_exact(folder: Path) -> None:
    """Require that the ledger proves each sample of each epoch once."""
    proof = proof_of(folder / "runs" / "stages")
    assert proof.exact, proof.faults
    assert [account.once for account in proof.accounts] == [SAMPLES] * EPOCHS


def require_trained(folder: Path, replicas: int) -> None:
    """Require the weights of so many replicas, equal to those of one process."""
    for stage in range(STAGES):
        expected = trained_alone(stage)
        weights = [load(path) for path in folder.glob(f"weights.{stage}.*.pt")]
        assert len(weights) == replicas
        for each in weights:
            assert distance(each, weights[0]) == 0
            assert distance(each, expected) < EXACT


@pytest.mark.parametrize("way", ["allreduce", "notified", "sharded"])
def test_replicas_of_two_stages_train_each_sample_once(tmp_path: Path, way: str) -> None:
    ended = run("paceline", *SCRIPT, way, folder=tmp_path, ranks=4)
    assert ended.status == 0, ended.text
    assert "Traceback" not in ended.text
    for epoch in range(EPOCHS):
        assert ended.text.count(f"epoch {epoch}: {SAMPLES} of 2 replicas") == 4
    require_trained(tmp_path, 2)
    require_exact(tmp_path)
