"""Stages of a mesh, as processes: the ledger counts replicas, and each stage trains exactly."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.harness.library.small_training import adamw
from tests.harness.library.stage_script import (
    EPOCHS,
    STAGES,
    part,
    stage_alone,
)
from tests.harness.network.ports import free_port
from tests.harness.processes.command import Command, Result
from tests.harness.processes.fault_runs import EXACT, distance, load, proof_of
from tests.harness.processes.launcher_commands import run
from tests.harness.processes.python_program import ROOT

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
        expected = stage_alone(stage)
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
    assert ended.text.count("mesh has the axis 'stage' of 2 ranks, which all train a model of") == 1
    for epoch in range(EPOCHS):
        assert ended.text.count(f"epoch {epoch}: {SAMPLES} of 2 replicas") == 4
    assert (
        len(set(re.findall(r"drawn (\S+)", ended.text))) == 4
    )  # each has random numbers of its own
    require_trained(tmp_path, 2)
    require_exact(tmp_path)


@pytest.mark.parametrize(("way", "ranks"), [("notified", 2), ("sharded", 4)])
def test_a_run_resumes_from_parts_that_no_rank_has_gathered(
    tmp_path: Path, way: str, ranks: int
) -> None:
    deaths = [f"0:1:3:{member}" for member in range(4)]
    killed = run("paceline", *SCRIPT, way, *deaths, folder=tmp_path, ranks=4)
    assert killed.status, killed.text
    folder = tmp_path / "runs" / "stages" / "checkpoints"
    newest = json.loads(max(folder.glob("step-*.json")).read_bytes())
    assert newest["step"] in range(2, 9)  # the writer may be a few steps behind
    for stage, name in enumerate(newest["files"]):
        state = torch.load(folder / name, weights_only=True)
        assert state["model"].keys() == part(stage).state_dict().keys()
        part(stage).load_state_dict(state["model"])
        adamw(part(stage)).load_state_dict(state["optimizer"])
    resumed = run("paceline", *SCRIPT, way, folder=tmp_path, ranks=ranks)
    assert resumed.status == 0, resumed.text
    assert f"Resuming from runs/stages/checkpoints/step-{newest['step']:08}.json" in resumed.text
    require_trained(tmp_path, ranks // 2)
    require_exact(tmp_path)


def test_another_number_of_stages_is_refused(tmp_path: Path) -> None:
    started = run("paceline", *SCRIPT, "notified", folder=tmp_path, ranks=2)
    assert started.status == 0, started.text
    other = run("paceline", *SCRIPT, "notified", "stages=4", folder=tmp_path, ranks=4)
    assert other.status == 2, other.text
    assert (
        "run stages: this run was started with mesh stage 2, but mesh is now stage 4; restore the "
        "former value, or give another run." in other.text
    )
    uneven = run("paceline", *SCRIPT, "notified", "stages=2", folder=tmp_path, ranks=3)
    assert uneven.status == 2, uneven.text
    assert "mesh 2 stages of 1 tensor rank: a replica takes 2 processes" in uneven.text


@pytest.mark.parametrize(("way", "member"), [("notified", 3), ("sharded", 0), ("allreduce", 1)])
def test_a_replica_that_loses_a_stage_leaves_and_the_other_continues(
    tmp_path: Path, way: str, member: int
) -> None:
    ended = run("paceline", *SCRIPT, way, f"0:1:2:{member}", folder=tmp_path, ranks=4)
    assert ended.status == 0, ended.text
    assert "Traceback" not in ended.text
    assert ended.text.count(". 2 processes continue from step ") == 1
    mate = (member + 2) % 4
    assert ended.text.count("This process had a replica of the model with it") == 1, mate
    require_trained(tmp_path, 1)
    require_exact(tmp_path)


def test_a_run_without_a_whole_replica_stops_and_the_same_command_resumes_it(
    tmp_path: Path,
) -> None:
    stopped = run("paceline", *SCRIPT, "notified", "0:1:3:1", folder=tmp_path, ranks=2)
    assert stopped.status == 1, stopped.text
    assert "With that, no replica of the model is whole any more." in stopped.text
    assert "Traceback" not in stopped.text
    resumed = run("paceline", *SCRIPT, "notified", folder=tmp_path, ranks=2)
    assert resumed.status == 0, resumed.text
    require_trained(tmp_path, 1)
    require_exact(tmp_path)


def test_replicas_that_lose_different_stages_at_once_save_what_the_others_have(
    tmp_path: Path,
) -> None:
    stopped = run("paceline", *SCRIPT, "notified", "0:1:3:0+3", folder=tmp_path, ranks=4)
    assert stopped.status == 1, stopped.text
    assert "With that, no replica of the model is whole any more." in stopped.text
    assert "Traceback" not in stopped.text
    saved = re.findall(r"the state after (\d) steps is saved in runs/stages", stopped.text)
    checkpoints = (tmp_path / "runs" / "stages" / "checkpoints").glob("step-*.json")
    newest = json.loads(max(checkpoints).read_bytes())
    assert newest["step"] == max(map(int, saved)) >= 6  # the killing step was the ninth
    resumed = run("paceline", *SCRIPT, "notified", folder=tmp_path, ranks=2)
    assert resumed.status == 0, resumed.text
    require_trained(tmp_path, 1)
    require_exact(tmp_path)


def start_machines(folder: Path, numbers: tuple[int, int], *words: str) -> list[Result]:
    """Train on two machines of a process each, which have folders of their own."""
    place = ("--num_shards", "2", "--run_id", "r", "--master", f"127.0.0.1:{free_port()}")
    machines = []
    for number, own in enumerate(numbers):
        (folder / f"machine{own}").mkdir(exist_ok=True)
        start = ("launch", "-n", "1", *place, "--shard_id", str(number), "--", sys.executable)
        environment = {"PYTHONPATH": str(ROOT)}
        machines.append(
            Command(
                *start, *SCRIPT, *words, folder=folder / f"machine{own}", environment=environment
            )
        )
    return [machine.wait() for machine in machines]


def test_parts_on_the_disks_of_two_machines_are_found_where_their_stages_change_places(
    tmp_path: Path,
) -> None:
    killed = start_machines(tmp_path, (0, 1), "sharded", "0:1:3:0", "0:1:3:1")
    assert all(machine.status for machine in killed), killed
    folders = [tmp_path / f"machine{n}" / "runs" / "stages" / "checkpoints" for n in (0, 1)]
    for stage, folder in enumerate(folders):
        assert {path.name.partition(".")[2] for path in folder.glob("step-*.pt")} == {
            f"stage{stage}of2.pt"
        }
    assert not list(folders[1].glob("step-*.json"))
    resumed = start_machines(tmp_path, (1, 0), "sharded")
    assert [machine.status for machine in resumed] == [0, 0], resumed
    assert "Resuming from runs/stages/checkpoints/step-" in resumed[0].text
    for stage, own in enumerate((1, 0)):
        (path,) = (tmp_path / f"machine{own}").glob(f"weights.{stage}.*.pt")
        assert distance(load(path), stage_alone(stage)) < EXACT
