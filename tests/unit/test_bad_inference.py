"""What can't be evaluated, predicted or exported is a sentence, and nothing is written."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.cli.main import main
from paceline.models.zoo import build_model
from paceline.state.weights import save_weights
from paceline.state.weights_about import describe
from tests.harness.library.finished_run import CONFIG, NAMES, write_image, write_model, write_run
from tests.harness.processes.bad_inputs import write_model as write_own

OWN = '''
import torch
from torch import nn


class Mean(nn.Module):
    """A classifier of the channels' means, and what no file can express of others."""

    def __init__(self, num_labels):
        super().__init__()
        self.fc = nn.Linear(3, num_labels)
        self.calls = 0

    def forward(self, x):
        return self.fc(x.mean((2, 3)))


class Eigen(Mean):
    def forward(self, x):
        return self.fc(torch.linalg.eigvals(x[:, :, :3, :3].mean(1)).real)


class Branches(Mean):
    def forward(self, x):
        return self.fc(x.mean((2, 3)) if x.sum() > 0 else x.amax((2, 3)))


class Undefined(Mean):
    def forward(self, x):
        return super().forward(x) * (torch.nan if torch.compiler.is_exporting() else 1)


class Counts(Mean):
    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls
'''


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs, weights and images, of which something is wrong with each."""
    here = tmp_path_factory.mktemp("bad")
    with pytest.MonkeyPatch.context() as patch:
        write_own(here, patch, OWN)
        write_run(Path("runs/pets"))
        write_run(Path("runs/new"))
        Path("runs/new/resnet20_model.pt").unlink()
        Path("runs/script").mkdir()
        Path("runs/script/config.toml").write_text('seed = 0\nmesh = "stage 2"\n')
        for number in range(3):
            write_image(Path("photos", NAMES[number], f"{number}.png"), number)
        Path("broken").mkdir()
        Path("broken/bad.jpg").write_text("no image")
        Path("empty").mkdir()
        assert main(["db", "create", "photos", "test", "--encoding", "raw"]) == 0
        write_model(Path("w.pt"), 0, described=True)
        write_model(Path("plain.pt"), 0)
        save_weights(Path("other.pt"), build_model("resnet56", num_labels=3, num_channels=3))
        write_model(Path("four.pt"), 0, num_labels=4)
        Path("torn.pt").write_bytes(Path("w.pt").read_bytes()[:-50])
        write_run(Path("runs/torn"))
        Path("runs/torn/resnet20_model.pt").write_bytes(Path("torn.pt").read_bytes())
        Path("text.pt").write_text("these are no weights")
        for name in ("Mean", "Eigen", "Branches", "Undefined", "Counts"):
            torch.manual_seed(0)
            model = build_model(f"own:{name}", num_labels=3, num_channels=3)
            config = replace(CONFIG, model=replace(CONFIG.model, model=f"own:{name}"))
            save_weights(Path(f"{name}.pt"), model, describe(config, NAMES))
        for name, parts in (("lost", ["stage0of2", "stage1of2"]), ("layers", ["tensor0of2"])):
            files = [f"{name}.{part}.pt" for part in parts]
            index = {"paceline": 1, "step": 4, "generation": "g", "parts": parts, "files": files}
            Path(f"{name}.json").write_text(json.dumps(index))
    return here


def contents(folder: Path) -> dict[str, str]:
    """Return a digest of each file, but of caches of Python's modules."""
    files = [p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


EXPORT = "--images photos --output new.out"
CASES = {
    "predict nowhere photos": "nowhere is neither a run folder nor the id of a run",
    "predict script photos": "it is the run of a script, whose model only that script knows",
    "predict new photos": "resnet20_best.pt isn't there: a run writes its weights after each epoch",
    "predict pets photos --weights none.pt": "--weights none.pt: there is no such file",
    "predict pets photos --weights runs/pets": "--weights runs/pets: is a folder; give a file of "
    "weights, such as runs/pets/resnet20_model.pt",
    "predict pets photos --weights other.pt": "unknown layer1.3.conv1.weight, "
    "layer1.3.bn1.weight, layer1.3.bn1.bias, … (216). Give --model resnet56.",
    "predict pets photos --weights four.pt": "fc.weight is 4×64 but should be 3×64",
    "predict plain.pt photos": "plain.pt has no description of its model inside",
    "predict torn.pt photos": "torn.pt: torn or damaged",
    "predict torn photos": "resnet20_model.pt: torn or damaged",
    "predict text.pt photos": "text.pt: not a file of weights; give one that a run",
    "predict w.pt nothing.png": "nothing.png: there is no such file or folder",
    "predict w.pt empty": "empty: the folder has no image",
    "predict w.pt broken": "1 of 1 image couldn't be read",
    "evaluate w.pt": "--test_data: no database is given, and there is no run that has one",
    "evaluate pets": "--test_data: no database is given, and pets records none",
    "evaluate w.pt --test_data gone": "--test_data gone: there is no such database",
    f"export w.pt --format pickle {EXPORT}": "pickle",
    f"export w.pt --format caffe2 {EXPORT}": "Caffe2's trainer has no resnet20, but resnet50, "
    "resnet101 and resnet152: give another --format",
    f"export w.pt --normalize_inside {EXPORT}": "--normalize_inside: a file of --format torch has "
    "the weights alone: give --format onnx or torch-export",
    "export w.pt --output w.pt --images photos": "w.pt is what is exported: give another --output",
    "export w.pt --images photos --output plain.pt": "plain.pt is there already: give another "
    "--output, or --overwrite",
    "evaluate w.pt --test_data test --confusion_png far/x.png": "--confusion_png far/x.png: is in "
    "a folder that isn't there; give the name of a file in a folder that you can write",
    "export w.pt --format onnx --images photos --output new.safetensors": "the name is that of "
    "--format safetensors, and the file is of --format onnx; end it in .onnx",
    "export w.pt --images photos --output photos": "--output photos: is a folder; give the name of",
    "export w.pt --images photos --output far/w.pt": "is in a folder that isn't there",
    "export w.pt --output new.out": "--test_data: no database is given, and there is no run that "
    "has one: give the path of one, or images by --images.",
    "export w.pt --images broken --output new.out": "no image can be read on which the file could",
    f"export w.pt --test_data test {EXPORT}": "--images and --test_data are both images",
    f"export pets --weights lost.json {EXPORT}": "lost.json: its part lost.stage0of2.pt isn't "
    "there: copy it from the machine of that stage into the folder",
    f"export pets --weights layers.json {EXPORT}": "its parts, such as tensor0of2, divide layers",
    f"export Eigen.pt --format onnx {EXPORT}": "--format onnx: ONNX has no operation for "
    "aten.linalg_eig, which the model calls; give another --format",
    f"export Branches.pt --format torch-export {EXPORT}": "--format torch-export: torch.export "
    "can't trace the model for batches of any size (GuardOnDataDependentSymNode",
    f"export Undefined.pt --format torch-export {EXPORT}": "new.out: its logits differ from the "
    "model's by up to inf",
    f"export Counts.pt --format torch-export {EXPORT}": "new.out: its logits differ from the "
    "model's by up to",
}
OF_THE_WORLD = ("broken", "Counts", "Undefined", "torn photos")  # status 1


@pytest.mark.parametrize("command", CASES)
def test_a_sentence_and_nothing_written(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    write_own(made, monkeypatch, OWN)
    before = contents(made)
    words = [*command.split(), *(["--use_cpu"] if "export" not in command else [])]
    try:
        status = main(words)
    except SystemExit as end:
        status = int(end.code or 0)
    error = capsys.readouterr().err
    assert status == (1 if any(word in command for word in OF_THE_WORLD) else 2), error
    assert CASES[command] in " ".join(error.replace("│", " ").split())
    assert "Traceback" not in error
    assert contents(made) == before
    assert not [*made.glob(".*.part")]


def test_there_are_twenty_cases_or_more() -> None:
    assert len(CASES) >= 20


def test_what_no_file_expresses_is_no_fault_of_what_can_be_expressed(
    made: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_own(made, monkeypatch, OWN)
    words = ["export", "Mean.pt", "--format", "torch-export", "--images", "photos"]
    assert main([*words, "--output", str(tmp_path / "mean.pt2")]) == 0
