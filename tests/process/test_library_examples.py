"""The examples run, go on where they were stopped, and tell what is true."""

from __future__ import annotations

import math
import re
import runpy
import signal
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.models.zoo import build_model
from tests.harness.data.image_folder import some_images
from tests.harness.processes.launcher_commands import Script, run
from tests.harness.processes.python_program import ROOT
from tests.harness.processes.run_folders import wait_until_step

EXAMPLES = ROOT / "examples"
SMALL = ("--files", "6", "--width", "32", "--layers", "1", "--length", "64", "--batch", "32")


def test_cifar10_tells_the_accuracy_that_its_checkpoint_has(tmp_path: Path) -> None:
    for part, each in (("train", 40), ("test", 7)):
        some_images(tmp_path / part, classes=3, each=each, size=32)
    command = (str(EXAMPLES / "cifar10.py"), str(tmp_path), "--run", "run", "--epochs", "2")
    ended = run("paceline", *command, folder=tmp_path)
    assert ended.status == 0, ended.text
    (told,) = re.findall(r"^epoch 1: (\d+\.\d)% of the test images$", ended.text, re.M)

    newest = max((tmp_path / "run/checkpoints").glob("step-*.pt"))
    model = build_model("resnet20", num_labels=10, num_channels=3)
    model.load_state_dict(torch.load(newest, weights_only=True)["model"])
    assert told == f"{accuracy(model, tmp_path / 'test'):.1%}"[:-1]

    again = run("paceline", *command, folder=tmp_path)
    assert again.status == 0, again.text
    assert "epoch 1:" not in again.text  # it was finished


def accuracy(model: torch.nn.Module, folder: Path) -> float:
    """Classify a folder's images by plain torch, one by one."""
    files = sorted(folder.glob("*/*.jpg"))
    classes = sorted(path.name for path in folder.iterdir())
    model.eval()
    right = 0
    for path in files:
        pixels = np.array(Image.open(path).convert("RGB").resize((32, 32)))
        image = torch.tensor(pixels) / 128 - 1
        with torch.no_grad():
            best = int(model(image.permute(2, 0, 1)[None]).argmax())
        right += classes[best] == path.parent.name
    return right / len(files)


def test_a_pipeline_saves_the_whole_model_that_it_evaluates(tmp_path: Path) -> None:
    size = ("--files", "3", "--width", "16", "--layers", "2", "--length", "64", "--batch", "64")
    options = (*size, "--epochs", "1", "--save", "model.pt")
    ended = run("paceline", str(EXAMPLES / "pipeline.py"), *options, folder=tmp_path, ranks=2)
    assert ended.status == 0, ended.text
    assert ended.text.count("Pin this choice with cuts=") == 1
    (told,) = re.findall(r"^epoch 0: .* held out (\d+\.\d{4})$", ended.text, re.M)

    example = runpy.run_path(str(EXAMPLES / "pipeline.py"))
    model = example["transformer"](16, 2, 64)
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    x, y = example["windows"](files[:1], 64).tensors
    with torch.no_grad():
        loss = example["loss_of"](model.eval()(x), y).item()
    assert float(told) == pytest.approx(loss / math.log(2), abs=1e-3)


def test_cifar10_has_sixty_lines() -> None:
    assert len((EXAMPLES / "cifar10.py").read_text().splitlines()) <= 60


def test_the_transformer_learns_and_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    command = (str(EXAMPLES / "transformer.py"), *SMALL, "--epochs", "2", "--run")
    whole = run("paceline", *command, "whole", folder=tmp_path)
    assert whole.status == 0, whole.text
    bits = [float(each) for each in re.findall(r"^epoch \d: (\S+) bits a byte$", whole.text, re.M)]
    assert len(bits) == 2
    assert bits[1] < bits[0] < 7  # of 128 symbols

    stopped = Script("paceline", *command, "run", folder=tmp_path)
    wait_until_step(tmp_path / "run", 1, 0)  # of a hundred and more
    stopped.send(signal.SIGTERM)
    assert stopped.wait().status == 143
    again = run("paceline", *command, "run", folder=tmp_path)
    assert again.status == 0, again.text
    assert "Resuming from" in again.text
    assert again.text.splitlines()[-2:] == whole.text.splitlines()[-2:]


def test_the_transformer_sees_no_byte_before_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["transformer.py"])
    example = runpy.run_path(str(EXAMPLES / "transformer.py"))
    model = example["Transformer"](16, 1, 8).eval()
    text = torch.randint(0, 128, (1, 8))
    other = text.clone()
    other[0, 5:] = (text[0, 5:] + 1) % 128
    with torch.no_grad():
        torch.testing.assert_close(model(text)[:, :5], model(other)[:, :5])
