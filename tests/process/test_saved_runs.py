"""Saved runs of an earlier Paceline: this one resumes them and reaches the same bits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.cli.main import main
from tests.harness.processes.command import run as run_command
from tests.harness.processes.run_folders import event_files, events
from tests.harness.processes.saved_runs import (
    differences,
    facts,
    saved_run,
    train_by_library,
    unpack,
)
from tests.harness.processes.torchrun_ranks import run_ranks

pytestmark = pytest.mark.timeout(400)  # see `torchrun_ranks.LIMIT`


def contents(run: Path) -> dict[str, bytes]:
    """Read all files of a run."""
    return {
        str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()
    }


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which commands may be given in this process."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["mid_epoch", "sharded", "int8"])
def test_a_run_stopped_in_mid_epoch_reaches_the_same_bits(here: Path, name: str) -> None:
    saved = saved_run(name)
    run = unpack(saved, here)
    ended = run_ranks(saved.arguments, saved.machines, here)
    assert ended.status == 0, ended.text
    assert differences(run, saved) == []
    assert (run / "finished").exists()
    assert main(["ledger", str(run)]) == 0  # each sample once, over both starts
    assert [path.name[-8:] for path in event_files(run)] == ["k0.jsonl", "-0.jsonl"]


def test_the_recorded_choice_of_an_exchange_is_taken(here: Path) -> None:
    saved = saved_run("auto")
    run = unpack(saved, here)
    recorded = (run / "exchange.toml").read_bytes()
    earlier = len(events(run))
    ended = run_ranks(saved.arguments, saved.machines, here)
    assert ended.status == 0, ended.text
    assert differences(run, saved) == []
    assert (run / "exchange.toml").read_bytes() == recorded
    notes = [event["text"] for event in events(run)[earlier:] if event["event"] == "note"]
    assert any("notified" in note and "exchange.toml" in note for note in notes), notes


@pytest.mark.parametrize("started_by", ["paceline", "torchrun"])
def test_the_same_command_finds_an_unfinished_run_of_the_default_id(
    here: Path, started_by: str
) -> None:
    saved = saved_run("default_id")
    run = unpack(saved, here)
    if started_by == "paceline":
        ended = run_command(*saved.arguments, folder=here)
    else:
        ended = run_ranks(saved.arguments, saved.machines, here)
    assert ended.status == 0, ended.text
    assert list((here / "runs").iterdir()) == [run]
    assert differences(run, saved) == []


def test_a_finished_run_is_left_as_it_is(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = saved_run("finished")
    run = unpack(saved, here)
    before = contents(run)
    assert main([*saved.arguments, "--run_id", run.name]) == 0
    assert f"run {run.name} is finished" in capsys.readouterr().err
    assert contents(run) == before


def test_after_a_finished_run_of_the_default_id_the_same_command_starts_the_next(
    here: Path,
) -> None:
    saved = saved_run("finished")
    run = unpack(saved, here)
    before = contents(run)
    ended = run_ranks(saved.arguments, saved.machines, here)
    assert ended.status == 0, ended.text
    (other,) = set((here / "runs").iterdir()) - {run}
    assert differences(other, saved) == []  # trained from the start to the same bits
    assert contents(run) == before


def test_an_unfinished_run_is_refused_with_another_flag(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = saved_run("mid_epoch")
    run = unpack(saved, here)
    before = contents(run)
    assert main([*saved.arguments, "--seed", "1"]) == 2
    assert "--seed" in capsys.readouterr().err
    assert contents(run) == before


def test_a_scripts_run_reaches_the_same_bits(tmp_path: Path) -> None:
    saved = saved_run("library")
    run = unpack(saved, tmp_path)
    assert train_by_library(run) == 6
    assert differences(run, saved) == []
    assert main(["ledger", str(run)]) == 0


def test_a_scripts_checkpoint_is_a_start_of_another_run(tmp_path: Path) -> None:
    saved = saved_run("library")
    run = unpack(saved, tmp_path)
    before = contents(run)
    (checkpoint,) = (run / "checkpoints").iterdir()
    assert train_by_library(tmp_path / "other", resume=checkpoint) == 6
    found = facts(tmp_path / "other")
    for name in ("checkpoint", "model", "momentum", "rates", "course", "tracked"):
        assert found[name] == saved.facts[name], name
    assert contents(run) == before
