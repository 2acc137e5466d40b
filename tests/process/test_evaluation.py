"""`paceline evaluate` has the scores of the run's own evaluation, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from tests.harness.data.image_folder import some_images
from tests.harness.processes.command import run
from tests.harness.processes.run_folders import events

IMAGES = 23
MODEL = (
    *("--model", "resnet20", "--image_size", "32", "--augment", "none", "--num_labels", "23"),
    *("--batch_size", "7", "--num_epochs", "1", "--label_smoothing", "0.1", "--use_cpu"),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of 23 images, one of each class."""
    folder = tmp_path_factory.mktemp("data")
    some_images(folder / "images", classes=IMAGES, each=1, size=32)
    made = run("db", "create", "images", "db", "--encoding", "raw", folder=folder)
    assert made.status == 0, made.text
    return folder / "db"


def evaluated(capsys: pytest.CaptureFixture[str], data: Path, *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["evaluate", *words, "--test_data", str(data), "--use_cpu", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_run_is_evaluated_as_it_was(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], workers: int
) -> None:
    words = ("train", "--train_data", str(data), "--test_data", str(data), *MODEL)
    ended = run(*words, "--num_workers", str(workers), "--run_id", "r", folder=tmp_path)
    assert ended.status == 0, ended.text
    folder = tmp_path / "runs/r"
    (epoch,) = [event for event in events(folder) if event["event"] == "epoch"]
    for words in ((str(folder),), (str(folder / "resnet20_best.pt"),)):
        found = evaluated(capsys, data, *words)
        assert found["loss"] == epoch["test_loss"]
        assert found["accuracy"] == epoch["test_accuracy"]
        assert found["top5"] == epoch["top5"]
    for other in {1, 2, 3} - {workers}:
        found = evaluated(capsys, data, str(folder), "--run_workers", str(other))
        assert found["loss"] == pytest.approx(epoch["test_loss"], rel=1e-6)
        for name, own in (("accuracy", "test_accuracy"), ("top5", "top5")):
            assert abs(found[name] - epoch[own]) * IMAGES < 1.01
