"""A training loop in plain torch, as a run that takes turns at the gate of `gpu_models.py`.

    python benchmarks/gpu_plain.py --model resnet50 --data FOLDER --workers 16 …    a DataLoader
    python benchmarks/gpu_plain.py --model resnet50 …                               synthetic images

The DataLoader is used as for ImageNet: worker processes with Pillow that stay, and pinned memory.
Synthetic images are in the device's memory. Everything else is as in `paceline train`: the layout
channels-last, autocast, and SGD, here torch's fused one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import gpu_models
import torch
from command_line import Options, run_script
from input import PillowDataset
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

from paceline.config.optim import OptimConfig
from paceline.wiring.model import make_optimizer

CLASSES = 1000


def main() -> None:
    options = _parser().parse_args()
    torch.manual_seed(0)
    device = torch.device(options.device)
    model = getattr(gpu_models, options.model)(CLASSES)
    model.to(device=device, memory_format=torch.channels_last)
    optimizer = make_optimizer(model, OptimConfig(base_learning_rate=1e-3), options.batch_size)
    for group in optimizer.param_groups:
        group["fused"] = True
    for images, labels in _batches(options, device):
        with torch.autocast(device.type, torch.bfloat16, device.type == "cuda"):
            loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _batches(options: argparse.Namespace, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches on the device, without end."""
    if options.data is None:
        shape = (options.batch_size, 3, options.image_size, options.image_size)
        images = torch.randn(shape, device=device).contiguous(memory_format=torch.channels_last)
        labels = torch.randint(CLASSES, (options.batch_size,), device=device)
        while True:
            yield images, labels
    loader = DataLoader(
        PillowDataset(options.data),
        options.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=options.workers,
        persistent_workers=True,
        pin_memory=device.type == "cuda",
    )
    while True:
        for images, labels in loader:
            moved = images.to(device, non_blocking=True)
            yield (
                moved.contiguous(memory_format=torch.channels_last),
                labels.to(device, non_blocking=True),
            )


def _parser() -> Options:
    parser = Options(__doc__)
    parser.add("--device", default="cuda")
    parser.add("--model", required=True, help="a function of gpu_models.py")
    parser.add("--data", type=Path, help="an LMDB; without it, images are synthetic")
    parser.add("--workers", type=int, default=1)
    parser.add("--batch_size", type=int, default=256)
    parser.add("--image_size", type=int, default=224)
    return parser


if __name__ == "__main__":
    run_script(main)
