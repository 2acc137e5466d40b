"""A training script: ResNet-20 on CIFAR-10, through the exchange that its first argument names.

    paceline launch -n 3 --num_servers 1 -- python server_script.py server:staleness=2 '{…}'

The names of `PRECISIONS` are ways, too: `notified` with sharded optimizer state, in autocast.

`server_ways.py` starts it. Each rank writes `result.RANK.json` when training has ended.
"""

from __future__ import annotations

import json
import math
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

import paceline
from paceline.models.zoo import build_model

MEAN = torch.tensor([125.3, 123.0, 113.9]).view(3, 1, 1)
STD = torch.tensor([63.0, 62.1, 66.7]).view(3, 1, 1)
SHARDED = {"sync": "notified", "update": "sharded"}
PRECISIONS: dict[str, dict[str, Any]] = {
    "autocast": SHARDED,  # weights of float32
    "bfloat16": {**SHARDED, "param_dtype": "bfloat16"},
    "float16": {**SHARDED, "param_dtype": "float16"},
}
RATE = 0.1  # for a global batch of 128


class Images(Dataset[tuple[Tensor, int]]):
    """Images of a folder of arrays, (3, 32, 32); for training, cropped and mirrored at random."""

    def __init__(self, folder: str, part: str, *, augment: bool) -> None:
        self.images = np.load(Path(folder) / f"{part}_images.npy")
        self.labels = np.load(Path(folder) / f"{part}_labels.npy")
        self.augment = augment

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = (torch.from_numpy(self.images[index]).float() - MEAN) / STD
        if self.augment:
            top, left, mirrored = torch.randint(9, (3,)).tolist()
            image = F.pad(image, (4, 4, 4, 4))[:, top : top + 32, left : left + 32]
            if mirrored % 2:
                image = image.flip(2)
        return image, int(self.labels[index])


def main(sync: str, data: str, results: str, seed: int, epochs: int, batch: int) -> None:
    torch.set_num_threads(1)
    world = paceline.join(seed=seed, first_iter_timeout=300)
    torch.manual_seed(seed)
    model: Any = build_model("resnet20", num_labels=10, num_channels=3)
    model = model.to(memory_format=torch.channels_last)
    rate = RATE * batch / 128
    options = {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, **options)
    paceline.parallelize(model, optimizer, world, **PRECISIONS.get(sync, {"sync": sync}))
    precision = partial(torch.autocast, "cpu", torch.bfloat16, enabled=sync in PRECISIONS)
    train = paceline.loader(Images(data, "train", augment=True), batch, world)
    test = paceline.loader(Images(data, "test", augment=False), 500, world, train=False)
    steps = epochs * math.ceil(train.samples / batch)
    begin = time.perf_counter()
    for _ in range(epochs):
        for x, y in train:
            factor = 0.5 * (1 + math.cos(math.pi * world.steps / steps))
            for group in optimizer.param_groups:
                group["lr"] = rate * factor * min(1.0, 2 * epochs * (world.steps + 1) / steps)
            with world.step():
                with precision():
                    scores = model(x)
                F.cross_entropy(scores.float(), y).backward()
                optimizer.step()
                optimizer.zero_grad()
    world.settle()
    seconds = time.perf_counter() - begin
    tested = world.meter("right")
    model.eval()
    with torch.no_grad(), precision():
        for x, y in world.evaluation(test):
            tested.add(right=(model(x).argmax(1) == y).sum())
    result = {
        "accuracy": float(tested.sums()["right"]) / test.samples,
        "seconds": seconds,
        "images": epochs * train.samples,
        "staleness": world.staleness,
    }
    Path(results, f"result.{world.rank}.json").write_text(json.dumps(result))
    world.close()


if __name__ == "__main__":
    main(sys.argv[1], **json.loads(sys.argv[2]))
