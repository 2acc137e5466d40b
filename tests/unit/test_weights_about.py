"""A file of weights describes its model: nothing else is needed to use it."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from paceline.cli.main import main
from paceline.errors import CheckpointError
from paceline.inference.trained_model import TrainedModel
from paceline.models.zoo import build_model
from paceline.state.weights_about import describe, read_description
from tests.harness.library.finished_run import (
    CONFIG,
    NAMES,
    logits_of,
    write_image,
    write_model,
    write_run,
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with three images, which is the present one."""
    monkeypatch.chdir(tmp_path)
    for number in range(3):
        write_image(Path("photos", NAMES[number], f"{number}.png"), number)
    return tmp_path


def output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main([*words, "--use_cpu", "--decode_workers", "0", "--json"]) == 0
    return capsys.readouterr().out


def test_torch_alone_reads_state_and_description(here: Path) -> None:
    model = write_model(Path("w.pt"), 0, described=True)
    state = torch.load("w.pt", weights_only=True)
    other = build_model("resnet20", num_labels=3, num_channels=3)
    other.load_state_dict(state)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )
    assert type(state) is OrderedDict
    assert state._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]
    about: dict[str, Any] = vars(state)["about"]
    assert json.loads(json.dumps(about)) == about
    assert about["classes"] == ["cat", "dog", "owl"]
    assert about["model"] == "resnet20"
    assert about["evaluation"] == {
        "resize": 32,
        "crop": 32,
        "mean": [120.0, 110.0, 100.0],
        "std": [60.0, 61.0, 62.0],
        "channels": "RGB",
    }


def test_a_file_alone_predicts_and_evaluates(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["db", "create", "photos", "test", "--encoding", "raw"]) == 0
    model = write_model(Path("w.pt"), 0, described=True)
    about = describe(CONFIG, NAMES)
    texts = {name: json.dumps(value) for name, value in about.items()} | {"by": "no JSON"}
    save_file(model.state_dict(), "w.safetensors", texts)
    write_run(Path("runs/pets"))
    probabilities = logits_of(model, 3).softmax(1)
    for file in ("w.pt", "w.safetensors"):
        lines = output(capsys, "predict", file, "photos", "--top", "3").splitlines()
        for line, row in zip(lines, probabilities, strict=True):
            found = {one["class"]: one["probability"] for one in json.loads(line)["classes"]}
            assert found == pytest.approx(dict(zip(NAMES, row.tolist(), strict=True)), abs=2e-6)
        assert output(capsys, "evaluate", file, "--test_data", "test") == output(
            capsys, "evaluate", "pets", "--test_data", "test"
        )


def test_a_file_decides_and_the_folder_around_it_does_not(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(Path("runs/pets"))
    Path("runs/pets/labels.txt").write_text("ant\nbee\nfly\n")
    write_model(Path("runs/pets/resnet20_best.pt"), 0, described=True)
    for run in ("pets", "runs/pets/resnet20_best.pt"):
        (line,) = output(capsys, "predict", run, "photos/cat/0.png").splitlines()
        assert {one["class"] for one in json.loads(line)["classes"]} == {*NAMES}


def test_a_file_that_does_not_describe_its_model_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(Path("w.pt"), 0)
    assert read_description(Path("w.pt")) is None
    assert main(["predict", "w.pt", "photos"]) == 2
    assert (
        "w.pt has no description of its model inside (name, classes, size of the images), as a "
        "run's weights have, and isn't in the folder of a run: give a run of the same model, and "
        "the file as --weights." in capsys.readouterr().err
    )
    write_run(Path("runs/pets"))
    assert output(capsys, "predict", "pets", "photos", "--weights", "w.pt")


def test_a_damaged_or_newer_description_is_a_sentence(here: Path) -> None:
    for change, sentence in (
        ({"paceline": 2}, "has the format 2, and this version of Paceline knows 1: update"),
        ({"image_size": "large"}, "the description of its model is damaged"),
    ):
        state = OrderedDict(weight=torch.zeros(1))
        vars(state).update(about={**describe(CONFIG, NAMES), **change})
        torch.save(state, "w.pt")
        with pytest.raises(CheckpointError, match=sentence):
            TrainedModel.read(None, torch.device("cpu"), "w.pt")


def test_lists_of_another_programs_attribute_are_no_description(here: Path) -> None:
    state = OrderedDict(weight=torch.zeros(1))
    vars(state).update(about=["Rider", 3])
    torch.save(state, "w.pt")
    assert read_description(Path("w.pt")) is None
