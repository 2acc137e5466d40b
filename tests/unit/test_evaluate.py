"""`paceline evaluate` scores the model of a run on a database."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib import colormaps
from PIL import Image
from torch.nn import functional as F

from paceline.cli.main import main
from paceline.inference.evaluation import most_confused
from paceline.observe.plots.confusion import confusion_png
from tests.harness.library.finished_run import NAMES, logits_of, write_image, write_model, write_run

IMAGES = 7


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run, and a database beside it, whose images have the classes 0, 1, 2, 0, 1, …."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs/pets"
    write_run(folder)
    for number in range(IMAGES):
        write_image(Path("images", NAMES[number % 3], f"{number}.png"), number)
    create = ["db", "create", "images", "test", "--encoding", "raw"]
    assert main(create) == 0
    return folder


def test_scores_are_the_models(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels = torch.arange(IMAGES) % 3
    for weights, seed in (("resnet20_model.pt", 0), ("resnet20_best.pt", 1)):
        logits = logits_of(write_model(run / weights, seed), IMAGES)
        capsys.readouterr()
        for name in ("pets", str(run / weights)):
            words = ["evaluate", name, "--test_data", "test", "--use_cpu", "--run_workers", "2"]
            assert main([*words, "--json"]) == 0
            found = json.loads(capsys.readouterr().out)
            right = logits.argmax(1) == labels
            assert found["images"] == IMAGES
            assert found["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
            assert found["accuracy"] == right.double().mean().item()
            assert found["top5"] == 1.0
            confusion = torch.zeros(3, 3, dtype=torch.int64)
            for label, taken in zip(labels, logits.argmax(1), strict=True):
                confusion[label, taken] += 1
            assert found["confusion"] == confusion.tolist()
            assert [one["class"] for one in found["classes"]] == [*NAMES]
            assert [one["images"] for one in found["classes"]] == [3, 2, 2]
            assert [one["right"] for one in found["classes"]] == confusion.diag().tolist()


def test_the_tables_name_the_classes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["evaluate", "pets", "--test_data", "test", "--use_cpu", "--confusion"]) == 0
    out, error = capsys.readouterr()
    assert out.startswith("7 images: loss ")
    assert "top-5" not in out  # of three classes
    assert all(out.count(name) >= 2 for name in NAMES)
    assert "Evaluating: 7 of 7 images" in error


def test_a_class_is_taken_most_often_for_another_one_or_for_none() -> None:
    assert most_confused([9, 1, 3], 0) == 2
    assert most_confused([0, 4, 5], 2) == 1
    assert most_confused([0, 7, 0], 1) is None
    assert most_confused([0, 0, 0], 0) is None


def test_the_matrix_is_drawn_with_a_cell_for_each_count(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["evaluate", "pets", "--test_data", "test", "--use_cpu", "--confusion_png"]
    assert main([*words, "matrix.png"]) == 0
    assert "matrix.png has the confusion matrix" in capsys.readouterr().err
    image = Image.open("matrix.png").convert("RGB")
    known = {colour for _, colour in image.getcolors(1 << 24)}  # type: ignore[union-attr]
    logits = logits_of(write_model(run / "other.pt", 0), IMAGES)
    for label in range(3):
        taken = logits[label::3].argmax(1)
        for other in range(3):
            share = (taken == other).double().mean().item()
            assert blue(share) in known


def test_a_class_is_a_row_of_the_picture() -> None:
    """Of two classes whose images are all taken for the second one, the right column is dark."""
    image = Image.open(io.BytesIO(confusion_png([[0, 10], [0, 10]], ["a", "b"]))).convert("RGB")
    pixels = np.asarray(image)[:, : image.width * 7 // 10]  # without the bar of colours
    rows, columns = np.nonzero((pixels == blue(1.0)).all(2))
    assert np.ptp(rows) > 1.8 * np.ptp(columns) > 0


def blue(share: float) -> tuple[int, ...]:
    """Return the colour of a share of a class, as matplotlib's own map has it."""
    return tuple(colormaps["Blues"](share, bytes=True)[:3])


def test_bad_input_is_a_sentence(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, name in enumerate(("ant", "bee", "cat")):
        write_image(Path("insects", name, "0.png"), number)
    assert main(["db", "create", "insects", "insects-db"]) == 0
    write_model(Path("four.pt"), 0, num_labels=4, described=True)
    for words, sentence in (
        ("pets --test_data nowhere", "--test_data nowhere: there is no such database"),
        ("pets --test_data insects-db", "its classes, ant, bee, cat, aren't those of the run"),
        ("owls --test_data test", "owls is neither a run folder nor the id of a run"),
        ("pets --test_data test --run_workers 0", "--run_workers 0: must be at least 1"),
        ("pets --test_data test --confusion_png x.pdf", "--confusion_png x.pdf: must end in .png"),
        ("pets --test_data test --confusion_png no/x.png", "--confusion_png no/x.png: is in a"),
        ("pets --test_data test --weights best", "resnet20_best.pt isn't there"),
        (
            "pets --test_data test --weights four.pt",
            "for 4 classes and 3 channels, and the run pets",
        ),
    ):
        assert main(["evaluate", *words.split(), "--use_cpu"]) == 2
        assert sentence in capsys.readouterr().err
