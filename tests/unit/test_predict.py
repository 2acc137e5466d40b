"""`paceline predict` classifies image files as the model of the run does, whatever lies beside."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.cli.main import main
from tests.harness.library.finished_run import (
    NAMES,
    logits_of,
    write_image,
    write_model,
    write_run,
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run, and some images beside it."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs/pets"
    write_run(folder)
    for number in range(5):
        write_image(Path(f"photos/holiday/{number}.png"), number)
    Path("photos/holiday/list.txt").write_text("no image")
    Path("photos/holiday/.hidden.png").write_text("no image")
    return folder


def expected(model: torch.nn.Module) -> torch.Tensor:
    return logits_of(model, 5).softmax(1)


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


def test_outputs_beyond_the_classes_are_shown_as_labels(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "labels.txt").write_text(f"{NAMES[0]}\n")
    (one,) = predicted(capsys, str(run), "photos/holiday/0.png")
    found = {each["label"]: each["class"] for each in one["classes"]}
    assert found == {0: NAMES[0], 1: "1", 2: "2"}


def test_an_image_that_cannot_be_read_is_named_and_the_others_are_classified(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("bad.jpg").write_text("no image")
    Path("pet.heic").write_bytes(b"\x00\x00\x00\x18ftypheic")
    Path("gone.png").symlink_to("nowhere")
    words = ["bad.jpg", "photos/holiday/1.png", "pet.heic", "gone.png", "photos/holiday/0.png"]
    words += ["removed.png", "photos"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(words)))
    options = ["--csv", "--top", "2", "--use_cpu", "--decode_workers", "0"]
    assert main(["predict", "pets", "-", *options]) == 1
    out, error = capsys.readouterr()
    rows = [*csv.DictReader(out.splitlines())]
    found = [f"photos/holiday/{number}.png" for number in range(5)]
    assert [row["image"] for row in rows] == [words[1], words[4], *found]
    assert [*rows[0]] == ["image", "class_1", "probability_1", "class_2", "probability_2"]
    for word in ("bad.jpg", "pet.heic", "gone.png", "removed.png"):
        assert f"paceline: {word} can't be" in error
    assert "paceline: 4 of 11 images couldn't be read." in error


def test_a_list_without_a_line_is_said(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["predict", "pets", "-", "--csv", "--use_cpu", "--decode_workers", "0"]) == 0
    out, error = capsys.readouterr()
    assert out.startswith("image,class_1,")
    assert error == "paceline: standard input names no image.\n"


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
