"""The ledger of real runs: killed, continued, moved to another number of workers, fine-tuned."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch

from paceline.cli.ledger import main as ledger
from tests.harness.processes.command import Command, all_end, kill, run
from tests.harness.processes.run_folders import (
    complete_lines,
    event_files,
    events,
    hold,
    release,
    wait_until_step,
    write_net,
)

WORDS = (
    *("train", "--train_data", "null", "--epoch_size", "70", "--image_size", "32"),
    *("--augment", "none", "--batch_size", "6", "--model", "net:plain", "--run_id", "r"),
)


def test_a_run_that_was_killed_and_went_on_with_another_number_of_workers_is_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_net(tmp_path)
    hold(tmp_path, 18)
    words = (*WORDS, "--num_labels", "3", "--num_epochs", "3", "--checkpoint_steps", "4")
    command = Command(*words, "--num_workers", "2", folder=tmp_path)
    wait_until_step(tmp_path / "runs" / "r", 15, generation=0)
    family = command.family()
    kill(*family)
    command.send(signal.SIGKILL)
    command.wait()
    assert all_end(family)
    release(tmp_path)
    assert ledger(["r"]) == 0
    capsys.readouterr()

    ended = run(*words, "--num_workers", "1", folder=tmp_path)
    assert ended.status == 0, ended.text
    assert ledger(["r", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["starts"], told["done"], told["committed"]) == (2, 36, 36)
    assert [account["once"] for account in told["accounts"]] == [70, 70, 70]

    (path,) = event_files(tmp_path / "runs" / "r", rank=1)
    path.rename(tmp_path / path.name)
    assert ledger(["r"]) == 0
    printed = capsys.readouterr().out
    assert f"no event file of member {path.name[7:-6]}: other members' lines prove" in printed

    _, path = event_files(tmp_path / "runs" / "r")
    assert {line.get("generation", 1) for line in complete_lines(path)} == {1}
    lines = path.read_text().splitlines(keepends=True)
    last = max(n for n, line in enumerate(lines) if '"event": "step"' in line)
    path.write_text("".join(lines[:last] + lines[last + 1 :]))
    assert ledger(["r"]) == 1
    assert "Not exact: 4 samples were lost" in capsys.readouterr().out


def test_weights_for_other_labels_are_fine_tuned_and_the_last_layer_is_told(tmp_path: Path) -> None:
    write_net(tmp_path)
    weights = {
        "body.0.weight": torch.ones(4, 3, 3, 3),
        "body.0.bias": torch.ones(4),
        "body.4.weight": torch.ones(7, 900),
        "body.4.bias": torch.ones(7),
    }
    torch.save({f"module.{name}": value for name, value in weights.items()}, tmp_path / "w.pt")
    words = (*WORDS, "--num_labels", "3", "--num_epochs", "1", "--load_model_path", "w.pt")
    ended = run(*words, "--base_learning_rate", "1e-9", folder=tmp_path)
    assert ended.status == 0, ended.text
    notes = [e["text"] for e in events(tmp_path / "runs" / "r") if e["event"] == "note"]
    assert (
        "w.pt: the last layer's body.4.weight is 7×900 but should be 3×900: it keeps its initial "
        "values."
    ) in notes
    state = torch.load(tmp_path / "runs" / "r" / "plain_model.pt", weights_only=True)
    assert torch.allclose(state["body.0.weight"], torch.ones(1).double(), atol=1e-3)
    assert state["body.4.weight"].shape == (3, 900)
