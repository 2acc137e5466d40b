"""Tensor ranks, as processes: their shards train as the whole model does in one process."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.harness.processes.command import Result
from tests.harness.processes.fault_runs import proof_of
from tests.harness.processes.launcher_commands import run

MESH = ("-m", "tests.harness.library.mesh_script")
SCRIPT = ("-m", "tests.harness.library.tensor_script")
EXACT = 1e-10


@pytest.mark.parametrize(("way", "ranks", "cases"), [("notified", 2, "012"), ("allreduce", 4, "2")])
def test_divided_models_train_as_whole_ones(
    tmp_path: Path, way: str, ranks: int, cases: str
) -> None:
    ended = run("paceline", *SCRIPT, way, *cases, folder=tmp_path, ranks=ranks)
    assert ended.status == 0, ended.text
    found = re.findall(r"(\S+) off", ended.text)
    assert len(found) == len(cases) * ranks, ended.text
    assert all(float(far) < EXACT for far in found), ended.text
    shares = [float(share) for share in re.findall(r": (\d\.\d\d),", ended.text)]
    assert max(shares) < 0.6, ended.text  # of the whole model


def require_exact(ended: Result, processes: int) -> None:
    """Require that so many processes have the weights of one."""
    assert ended.status == 0, ended.text
    assert "Traceback" not in ended.text
    found = re.findall(r"(\S+) off", ended.text)
    assert len(found) == processes, ended.text
    assert all(float(far) < EXACT for far in found), ended.text


@pytest.mark.parametrize(
    ("stages", "ranks", "part"), [(0, 2, "tensor"), (2, 4, "stage1of2-tensor")]
)
def test_divided_layers_resume_from_the_parts_of_their_ranks(
    tmp_path: Path, stages: int, ranks: int, part: str
) -> None:
    words = (*MESH, "runs/r", str(stages))
    killed = run("paceline", *words, "all:6", folder=tmp_path, ranks=ranks)
    assert killed.status, killed.text
    folder = tmp_path / "runs" / "r" / "checkpoints"
    newest = json.loads(max(folder.glob("step-*.json")).read_bytes())
    assert len(newest["parts"]) == ranks
    assert f"{part}1of2" in newest["parts"]
    resumed = run("paceline", *words, folder=tmp_path, ranks=ranks)
    assert f"Resuming from runs/r/checkpoints/step-{newest['step']:08}.json" in resumed.text
    require_exact(resumed, ranks)


def test_a_replica_of_stages_that_loses_a_tensor_rank_leaves_and_the_other_continues(
    tmp_path: Path,
) -> None:
    ended = run("paceline", *MESH, "runs/r", "2", "one:3", folder=tmp_path, ranks=8)
    assert ended.text.count(". 4 processes continue from step ") == 1, ended.text
    assert ended.text.count("This process had a replica of the model with it") == 3
    require_exact(ended, 4)
    proof = proof_of(tmp_path / "runs" / "r")
    assert proof.exact, proof.faults
    assert [account.once for account in proof.accounts] == [50, 50]


def test_a_replica_that_loses_a_tensor_rank_leaves_and_the_other_continues(tmp_path: Path) -> None:
    ended = run("paceline", *SCRIPT, "notified-kill", "2", folder=tmp_path, ranks=4)
    assert ended.status == 0, ended.text
    assert "Traceback" not in ended.text
    assert ended.text.count(". 2 processes continue from step ") == 1
    found = re.findall(r"(\S+) off", ended.text)
    assert len(found) == 2, ended.text
    assert all(float(far) < EXACT for far in found), ended.text
