"""A model of 128 MiB in stages, each process in a memory group of its own.

    python -m tests.harness.library.large_stages STAGES GROUP …

Each process joins its group before it builds the model, and prints its peaks in bytes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import paceline
from tests.harness.processes.memory_groups import MemoryGroup

WIDTH = 2048
LAYERS = 8
STEPS = 3
WEIGHTS = LAYERS * (WIDTH + 1) * WIDTH * 4  # bytes


def main(stages: int, groups: list[str]) -> None:
    """Train, and print."""
    torch.optim.SGD([torch.zeros(1)])  # what these import doesn't count
    with paceline.deferred_init():
        nn.Linear(2, 2)
    world = paceline.join(mesh={"stage": stages}, snapshots=False)
    group = MemoryGroup(Path(groups[world.rank]))
    group.join()
    torch.manual_seed(3)
    with paceline.deferred_init():
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    built = group.peak
    cuts = [str(LAYERS // stages * n) for n in range(1, stages)]
    part = paceline.stages(model, world, loss=F.mse_loss, microbatches=2, cuts=cuts)
    del model
    materialized = group.peak
    optimizer = torch.optim.SGD(part.parameters(), lr=1.0, momentum=0.9)
    part, optimizer = paceline.parallelize(part, optimizer, world)
    x = torch.ones(4, WIDTH)
    for _ in range(STEPS):
        with world.step(samples=len(x)):
            part.train_batch(x, x)
            optimizer.step()
            optimizer.zero_grad()
    peaks = {"built": built, "with values": materialized, "trained": group.peak}
    print(json.dumps({"stage": world.coordinate("stage"), **peaks}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
