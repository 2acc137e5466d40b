"""`paceline export` writes files that other programs run with the model's results."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from paceline.cli.main import main
from paceline.snapshots.position import Position
from tests.harness.library.finished_run import (
    NAMES,
    logits_of,
    pixels,
    write_image,
    write_model,
    write_run,
)

IMAGES = 72  # a batch of 1, one of 7 and one of 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file of weights that describes its model, and images."""
    here = tmp_path_factory.mktemp("export")
    for number in range(IMAGES):
        write_image(here / f"photos/{number:02}.png", number)
    return here


@pytest.fixture(scope="module")
def model(folder: Path) -> nn.Module:
    return write_model(folder / "w.pt", 0, described=True)


def exported(
    folder: Path, capsys: pytest.CaptureFixture[str], kind: str, *words: str
) -> tuple[Path, dict[str, Any]]:
    path = folder / f"{kind}-{len(words)}"
    options = ["--format", kind, "--images", str(folder / "photos"), "--output", str(path)]
    capsys.readouterr()
    assert main(["export", str(folder / "w.pt"), *options, *words, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert result["file"] == str(path)
    assert result["images"] == IMAGES
    assert result["largest_difference"] <= 1e-4 * result["largest_logit"]
    return path, result


def raw() -> Tensor:
    """Return the images' pixels, (n, 3, 32, 32), from 0 to 255."""
    return torch.stack([torch.from_numpy(pixels(n)) for n in range(IMAGES)]).permute(0, 3, 1, 2)


def normalised() -> Tensor:
    mean = torch.tensor([120.0, 110, 100]).view(3, 1, 1)
    return (raw() - mean) / torch.tensor([60.0, 61, 62]).view(3, 1, 1)


def require_equal(found: Tensor, wanted: Tensor) -> None:
    assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_weights_are_those_of_the_model_and_described(
    folder: Path, model: nn.Module, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    path, result = exported(folder, capsys, kind)
    assert result["largest_difference"] == 0
    if kind == "torch":
        state = torch.load(path, weights_only=True)
        classes = vars(state)["about"]["classes"]
    else:
        with safe_open(path, "pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            classes = json.loads(file.metadata()["classes"])
    assert classes == [*NAMES]
    assert all(torch.equal(state[name], v) for name, v in model.state_dict().items())
    assert main(["predict", str(path), str(folder / "photos/00.png"), "--use_cpu"]) == 0


def test_a_file_is_beside_the_weights_and_never_over_them(
    folder: Path, model: nn.Module, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (folder / "w.pt").read_bytes()
    for kind, name in (("torch", "w_export.pt"), ("safetensors", "w.safetensors")):
        words = ("--format", kind, "--images", str(folder / "photos"))
        assert main(["export", str(folder / "w.pt"), *words]) == 0
        assert capsys.readouterr().out.startswith(f"{folder / name}: ")
        assert (folder / name).exists()
    assert (folder / "w.pt").read_bytes() == before


@pytest.mark.parametrize("words", [(), ("--normalize_inside",)])
def test_onnx_runs_in_batches_of_any_size(
    folder: Path, model: nn.Module, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    path, _ = exported(folder, capsys, "onnx", *words)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for value in (*session.get_inputs(), *session.get_outputs()):
        assert value.shape[0] == "batch"
    wanted = logits_of(model, IMAGES)
    images = raw().float() if words else normalised()
    for size in (1, 7, 64):
        parts = [session.run(None, {"images": part.numpy()})[0] for part in images.split(size)]
        require_equal(torch.cat([torch.from_numpy(part) for part in parts]), wanted)
    about = session.get_modelmeta().custom_metadata_map
    assert json.loads(about["classes"]) == [*NAMES]
    form = json.loads(about["evaluation"])
    mean = torch.tensor(form["mean"]).view(3, 1, 1)
    std = torch.tensor(form["std"]).view(3, 1, 1)
    require_equal((raw() - mean) / std, images)


def test_torch_export_runs_in_batches_of_any_size(
    folder: Path, model: nn.Module, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = exported(folder, capsys, "torch-export")
    extra = {"about.json": ""}
    with path.open("rb") as file:
        run = torch.export.load(file, extra_files=extra).module()
    wanted = logits_of(model, IMAGES)
    for size in (1, 7, 64):
        with torch.no_grad():
            require_equal(torch.cat([run(part) for part in normalised().split(size)]), wanted)
    assert json.loads(extra["about.json"])["classes"] == [*NAMES]


def test_the_parts_of_a_checkpoint_are_joined(
    folder: Path, model: nn.Module, capsys: pytest.CaptureFixture[str]
) -> None:
    state = model.state_dict()
    index = {"paceline": 1, "step": 4, "generation": "g", "parts": [], "files": []}
    for stage in range(2):
        part = f"stage{stage}of2"
        own = {name: v for name, v in state.items() if name.startswith("layer3") == bool(stage)}
        entries = {"model": own, "optimizer": {}, "position": asdict(Position(number=4))}
        torch.save({"paceline": 1, **entries}, folder / f"step-00000004.{part}.pt")
        index["parts"].append(part)  # type: ignore[attr-defined]
        index["files"].append(f"step-00000004.{part}.pt")  # type: ignore[attr-defined]
    (folder / "step-00000004.json").write_text(json.dumps(index))
    write_run(folder / "runs/pets")
    words = ["export", "pets", "--output_dir", str(folder / "runs"), "--num_images", "8"]
    words += ["--weights", str(folder / "step-00000004.json"), "--images", str(folder / "photos")]
    assert main([*words, "--output", str(folder / "joined.pt")]) == 0
    assert "joined.pt: largest difference 0 on 8 images" in capsys.readouterr().out
    joined = torch.load(folder / "joined.pt", weights_only=True)
    assert all(torch.equal(joined[name], value) for name, value in state.items())
