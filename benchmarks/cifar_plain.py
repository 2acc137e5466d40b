"""The peer of docs/benchmarks/accuracy.md's CIFAR-10 run: plain PyTorch, one process, no Paceline.

Reads class folders with Pillow, holds all images in memory, and trains the same ResNet-20 with the
same schedule: what accuracy these files and this many epochs give.

    python benchmarks/cifar_plain.py cifar10/train cifar10/test --epochs 20
"""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import torch
from command_line import Options, run_script
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.models.zoo import build_model

MEAN = torch.tensor([125.3, 123.0, 113.9]).view(1, 3, 1, 1)
STD = torch.tensor([63.0, 62.1, 66.7]).view(1, 3, 1, 1)


def read(folder: Path) -> tuple[Tensor, Tensor]:
    """Return images, (n, 3, 32, 32) normalised, and labels, (n,)."""
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    files = [
        (file, i) for i, name in enumerate(names) for file in sorted((folder / name).iterdir())
    ]
    pixels = np.stack([np.asarray(Image.open(file).convert("RGB")) for file, _ in files])
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float()
    return (images - MEAN) / STD, torch.tensor([label for _, label in files])


def augmented(images: Tensor) -> Tensor:
    """Pad by 4, crop at random, mirror half of them."""
    padded = F.pad(images, (4, 4, 4, 4))
    out = torch.empty_like(images)
    for i, (top, left, flip) in enumerate(torch.rand(len(images), 3).tolist()):
        top, left = int(top * 9), int(left * 9)
        crop = padded[i, :, top : top + 32, left : left + 32]
        out[i] = crop.flip(2) if flip < 0.5 else crop
    return out.contiguous(memory_format=torch.channels_last)


def main() -> None:
    parser = Options(__doc__)
    parser.add("train", type=Path)
    parser.add("test", type=Path)
    parser.add("--epochs", type=int, default=20)
    parser.add("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    images, labels = read(options.train)
    model = build_model("resnet20", num_labels=10, num_channels=3)
    model = model.to(memory_format=torch.channels_last)
    steps = math.ceil(len(images) / 128)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4
    )
    rate = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 1 / steps, total_iters=steps),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps * (options.epochs - 1)),
        ],
        [steps],
    )
    for epoch in range(options.epochs):
        start = time.perf_counter()
        model.train()
        for batch in torch.randperm(len(images)).split(128):
            loss = nn.functional.cross_entropy(model(augmented(images[batch])), labels[batch])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            rate.step()
        print(f"epoch {epoch + 1}: {accuracy(model, options.test):.2%}, ", end="")
        print(f"{len(images) / (time.perf_counter() - start):.0f} images/s", flush=True)


@torch.no_grad()
def accuracy(model: nn.Module, folder: Path) -> float:
    """Return the share of a folder's images that the model gets right."""
    model.eval()
    images, labels = read(folder)
    right = sum(
        int((model(x).argmax(1) == y).sum())
        for x, y in zip(images.split(500), labels.split(500), strict=True)
    )
    return right / len(images)


if __name__ == "__main__":
    run_script(main)
