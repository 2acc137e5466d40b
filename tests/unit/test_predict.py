"""`paceline predict` classifies image files as the model of the run does, whatever lies beside."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from PIL import Image

from paceline.cli.main import main
from paceline.config.data import DataConfig
from paceline.config.model import ModelConfig
from paceline.config.train import TrainConfig
from paceline.models.zoo import build_model
from paceline.state.weights import save_weights

NAMES = ("cat", "dog", "owl")
CONFIG = TrainConfig(
    data=DataConfig(
        train_data="x",
        num_labels=3,
        image_size=32,
        augment="none",
        image_mean_per_channel=(120.0, 110.0, 100.0),
        image_std_per_channel=(60.0, 61.0, 62.0),
    ),
    model=ModelConfig(model="resnet20"),
)


def write_model(path: Path, seed: int, num_labels: int = 3) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = build_model("resnet20", num_labels=num_labels, num_channels=3)
    save_weights(path, model)
    return model.eval()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run, and some images beside it."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs/pets"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(tomli_w.dumps(CONFIG.identity()))
    (folder / "labels.txt").write_text("".join(f"{name}\n" for name in NAMES))
    write_model(folder / "resnet20_model.pt", 0)
    photos = tmp_path / "photos/holiday"
    photos.mkdir(parents=True)
    for number in range(5):
        Image.fromarray(pixels(number)).save(photos / f"{number}.png")
    (photos / "list.txt").write_text("no image")
    (photos / ".hidden.png").write_text("no image")
    return folder


def pixels(number: int) -> Any:
    return np.random.default_rng(number).integers(0, 256, (32, 32, 3), np.uint8)


@torch.no_grad()
def expected(model: torch.nn.Module) -> torch.Tensor:
    images = torch.stack([torch.from_numpy(pixels(number)) for number in range(5)]).double()
    mean, std = torch.tensor([120.0, 110, 100]), torch.tensor([60.0, 61, 62])
    normalised = ((images - mean) / std).permute(0, 3, 1, 2).float()
    probabilities: torch.Tensor = model(normalised).softmax(1)
    return probabilities


def predicted(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main(["predict", *words, "--json", "--use_cpu", "--decode_workers", "0"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_images_get_the_probabilities_of_the_runs_model(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for weights, seed in (("", 0), ("best", 1), ("last", 0), ("other.pt", 2)):
        path = {"best": run / "resnet20_best.pt", "other.pt": Path("other.pt")}.get(weights)
        model = write_model(path or run / "resnet20_model.pt", seed)
        words = ["pets", "photos", "--top", "9", "--batch_size", "2", "--weights", weights]
        found = predicted(capsys, *words)
        assert [one["image"] for one in found] == [f"photos/holiday/{n}.png" for n in range(5)]
        for one, row in zip(found, expected(model), strict=True):
            assert [each["class"] for each in one["classes"]] == [
                NAMES[label] for label in row.argsort(descending=True)
            ]
            for each in one["classes"]:
                assert each["probability"] == pytest.approx(row[each["label"]].item(), abs=2e-6)


def test_the_best_weights_come_first_and_classes_without_names_are_numbers(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = write_model(run / "resnet20_best.pt", 1)
    (run / "labels.txt").unlink()
    (one,) = predicted(capsys, str(run), "photos/holiday/0.png", "--top", "1")
    label = int(expected(best)[0].argmax())
    assert one["classes"][0]["class"] == str(label)


def test_an_image_that_cannot_be_read_is_named_and_the_others_are_classified(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("bad.jpg").write_text("no image")
    Path("pet.heic").write_bytes(b"\x00\x00\x00\x18ftypheic")
    Path("gone.png").symlink_to("nowhere")
    words = ["bad.jpg", "photos/holiday/1.png", "pet.heic", "gone.png", "photos/holiday/0.png"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(words)))
    options = ["--csv", "--top", "2", "--use_cpu", "--decode_workers", "0"]
    assert main(["predict", "pets", "-", *options]) == 1
    out, error = capsys.readouterr()
    rows = [*csv.DictReader(out.splitlines())]
    assert [row["image"] for row in rows] == [words[1], words[4]]
    assert [*rows[0]] == ["image", "class_1", "probability_1", "class_2", "probability_2"]
    for word in ("bad.jpg", "pet.heic", "gone.png"):
        assert f"paceline: {word} can't be" in error
    assert "paceline: 3 of 5 images couldn't be read." in error


def test_many_images_are_decoded_by_processes_in_their_order(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [f"photos/holiday/{number % 5}.png" for number in range(23)]
    words = ["predict", "pets", *paths, "--top", "1", "--batch_size", "4", "--use_cpu"]
    assert main([*words, "--decode_workers", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == paths
    assert lines[:5] == lines[5:10]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("nowhere photos", "nowhere is neither a run folder nor the id of a run"),
        ("pets", "An image or a folder is required"),
        ("pets nothing.png", "nothing.png: there is no such file or folder"),
        ("pets empty", "empty: the folder has no image"),
        ("pets photos --weights best", "resnet20_best.pt isn't there"),
        ("pets photos --weights none.pt", "--weights none.pt: there is no such file"),
        ("pets photos --weights four.pt", "the last layer's fc.weight is 4×64 but should be 3×64"),
        ("pets photos --top 0", "--top 0: must be at least 1"),
        ("pets photos --csv --json", "two forms of one output"),
        ("script photos", "it is the run of a script"),
    ],
)
def test_bad_input_is_a_sentence(
    run: Path, capsys: pytest.CaptureFixture[str], words: str, sentence: str
) -> None:
    Path("empty").mkdir()
    Path("runs/script/members").mkdir(parents=True)
    write_model(Path("four.pt"), 0, num_labels=4)
    assert main(["predict", *words.split()]) == 2
    out, error = capsys.readouterr()
    assert sentence in error
    assert not out
