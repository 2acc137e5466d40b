"""A finished run of `paceline train`, written by hand: configuration, weights, class names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from PIL import Image

from paceline.config.data import DataConfig
from paceline.config.model import ModelConfig
from paceline.config.train import TrainConfig
from paceline.models.zoo import build_model
from paceline.observe.csv_log import COLUMNS
from paceline.state.weights import save_weights
from paceline.state.weights_about import describe

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


def write_run(folder: Path) -> None:
    """Write a run's folder, with weights of seed 0 after its last epoch."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(tomli_w.dumps(CONFIG.identity()))
    (folder / "labels.txt").write_text("".join(f"{name}\n" for name in NAMES))
    write_model(folder / "resnet20_model.pt", 0)


def write_logged_run(folder: Path, rate: float, rows: Sequence[str], *, finished: bool) -> None:
    """Write the folder of a run of two epochs of 20 steps: its configuration, log and last step.

    Args:
        rate: its learning rate.
        rows: of the log.
        finished: whether it came to its end.
    """
    folder.mkdir(parents=True)
    flags = {**CONFIG.identity(), "base_learning_rate": rate, "num_epochs": 2}
    (folder / "config.toml").write_text(tomli_w.dumps(flags))
    text = "\n".join(["# Namespace()", ",".join(COLUMNS), *rows, ""])
    (folder / "resnet20.log").write_text(text)
    step = {"event": "step", "generation": 0, "step": 20 * len(rows) - 1}
    cost = {
        **{"event": "cost", "generation": 0, "processor_hours": 0.5, "gpu_hours": 0.0},
        **{"machine_hours": 0.25, "processor_kwh": 0.0625, "gpu_kwh": None, "price": 2 * rate},
    }
    lines = [step, cost] if rows else [step]
    (folder / "events.a-0.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    if finished:
        (folder / "finished").write_text("finished\n")


def write_model(
    path: Path, seed: int, num_labels: int = 3, *, described: bool = False
) -> torch.nn.Module:
    """Write the weights of a seed, undescribed as in earlier versions; return the model."""
    torch.manual_seed(seed)
    model = build_model("resnet20", num_labels=num_labels, num_channels=3)
    config = replace(CONFIG, data=replace(CONFIG.data, num_labels=num_labels))
    save_weights(path, model, describe(config, NAMES) if described else None)
    return model.eval()


def write_image(path: Path, number: int) -> None:
    """Write an image file of noise, the same for a number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels(number)).save(path)


def pixels(number: int) -> Any:
    """Return the pixels of such an image, uint8 of shape (32, 32, 3)."""
    return np.random.default_rng(number).integers(0, 256, (32, 32, 3), np.uint8)


@torch.no_grad()
def logits_of(model: torch.nn.Module, count: int) -> torch.Tensor:
    """Return the logits of the first images, by plain torch."""
    images = torch.stack([torch.from_numpy(pixels(number)) for number in range(count)]).double()
    mean = torch.tensor([120.0, 110, 100])
    std = torch.tensor([60.0, 61, 62])
    normalised = ((images - mean) / std).permute(0, 3, 1, 2).float()
    logits: torch.Tensor = model(normalised)
    return logits
