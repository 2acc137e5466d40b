"""A script's loop goes back to a snapshot in the same processes, whenever its generation ends."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from paceline.cli import ledger
from paceline.state.run_folder import next_generation
from tests.harness.library.gan import SAMPLES
from tests.harness.library.gan_rollbacks import CASES as GANS
from tests.harness.library.rollback_script import AVERAGES, CASES, EPOCHS, TRIALS
from tests.harness.processes.command import Command
from tests.harness.processes.launcher_commands import run
from tests.harness.processes.run_folders import events

SCRIPT = ("-m", "tests.harness.library.rollback_script")
# Cases of which a member that was away can miss nothing that it doesn't miss in another one.
LIKE_OTHERS = ("allreduce", "notified", "accumulation", "auto")
DURABLE = "tests.harness.library.durable_script"


def test_a_loop_whose_generations_end_in_mid_step_trains_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = run("paceline", *SCRIPT, "2", "runs", *CASES, *AVERAGES, folder=tmp_path)
    assert ended.status == 0, ended.text
    for name in (*CASES, *AVERAGES):
        assert ended.text.count(f"{name}: equal") == 2
        folder = tmp_path / "runs" / name
        assert samples_trained(folder, capsys) == [50] * EPOCHS
        for rank in range(2):
            lines = events(folder, rank)
            started = [line["generation"] for line in lines if line["event"] == "run"]
            assert started[-5:] == [1, 2, 3, 4, 5]  # 0 may end before its first step is recorded
            assert {line["generation"] for line in lines if line["event"] == "step"} <= {*range(6)}
        assert next_generation(folder) == 6


def test_a_loop_continues_with_two_of_three_members_and_with_all_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = (*(name for name in CASES if name not in LIKE_OTHERS), *AVERAGES)
    ended = run("paceline", *SCRIPT, "3", "runs", *names, folder=tmp_path, ranks=3)
    assert ended.status == 0, ended.text
    for name in names:
        digests = re.findall(f"{name}: close (\\w+)", ended.text)
        assert len(digests) == 3, ended.text
        assert len(set(digests)) == 1
        assert samples_trained(tmp_path / "runs" / name, capsys) == [50] * EPOCHS


def test_a_loop_whose_generations_end_around_the_trials_of_autotuning_trains_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = run("paceline", *SCRIPT, "2", "runs", "trials", folder=tmp_path)
    assert ended.status == 0, ended.text
    assert ended.text.count("trials: equal") == 2
    assert ended.text.count("Pin this choice") == 2  # once a training: no trials follow a choice
    assert samples_trained(tmp_path / "runs" / "trials", capsys) == [50] * TRIALS.epochs


@pytest.mark.parametrize(
    ("ranks", "names"),
    [(2, tuple(GANS)), (3, ("a block each", "one call", "sharded"))],  # of each method and block
    ids=["2 ranks", "3 ranks"],
)
def test_a_gan_whose_generations_end_in_mid_step_trains_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: int, names: tuple[str, ...]
) -> None:
    script = ("-m", "tests.harness.library.gan_rollbacks", str(ranks), "runs", *names)
    ended = run("paceline", *script, folder=tmp_path, ranks=ranks)
    assert ended.status == 0, ended.text
    for name in names:
        digests = re.findall(f"{name}: {'equal' if ranks == 2 else 'close'} (\\w+)", ended.text)
        assert len(digests) == ranks, ended.text
        assert len(set(digests)) == 1
        assert samples_trained(tmp_path / "runs" / name, capsys) == [SAMPLES] * EPOCHS


def test_a_server_of_merges_serves_each_generation_of_its_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "meet").mkdir()
    meet = ("--run_id", "served", "--file_store_path", "meet")
    script = (sys.executable, *SCRIPT, "3", "runs", "served")
    training = Command("launch", "-n", "3", *meet, "--", *script, folder=tmp_path)
    server = Command("serve", *meet, folder=tmp_path).wait()
    ended = training.wait()
    assert server.status == 0, server.text
    assert server.text.count("The workers continue in their next generation.") == 4
    assert ended.status == 0, ended.text
    digests = re.findall("served: close (\\w+)", ended.text)
    assert len(digests) == 3, ended.text
    assert len(set(digests)) == 1
    assert samples_trained(tmp_path / "runs" / "served", capsys) == [50] * EPOCHS


def test_a_loop_that_lost_a_part_of_its_state_goes_back_to_a_checkpoint_of_the_epoch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = run("paceline", "-m", DURABLE, "runs/r", "8", folder=tmp_path, ranks=3)
    assert ended.status == 0, ended.text
    assert "1 process continues from the durable state of step " in ended.text
    assert re.search(r"went back from step 8 to step [567] of epoch 2", ended.text), ended.text
    assert ended.text.count("close") == 1
    assert samples_trained(tmp_path / "runs" / "r", capsys) == [50] * 3


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("runs/r", "The run can't go back in its processes: it has no checkpoint yet."),
        ("", "The run has no run folder, and so no checkpoint."),
    ],
    ids=["no checkpoint yet", "no run folder"],
)
def test_a_loop_that_cannot_go_back_ends_with_a_sentence(
    tmp_path: Path, folder: str, reason: str
) -> None:
    ended = run("paceline", "-m", DURABLE, folder, "1", folder=tmp_path, ranks=3)
    assert ended.status == 1, ended.text
    assert reason in ended.text
    assert "Traceback" not in ended.text


def samples_trained(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[int]:
    """Return how many samples were trained once, by epoch, as the ledger counts them."""
    capsys.readouterr()
    assert ledger.main([str(folder), "--json"]) == 0
    return [one["once"] for one in json.loads(capsys.readouterr().out)["accounts"]]
