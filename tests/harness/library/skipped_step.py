"""Two models, of which the last rank leaves out one update, in a block of its own or in the same.

python -m tests.harness.library.skipped_step BLOCKS SYNC
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import paceline
from tests.harness.library.small_training import BATCH, samples, sgd


def main() -> None:
    blocks, sync = sys.argv[1:]
    world = paceline.join(timeout=20)
    first, second = nn.Linear(6, 3).double(), nn.Linear(6, 3).double()
    optimizers = [sgd(first), sgd(second)]
    for model, optimizer in zip((first, second), optimizers, strict=True):
        paceline.parallelize(model, optimizer, world, sync=sync)

    def train(x: torch.Tensor, *, skips: bool) -> None:
        second(x).pow(2).mean().backward()
        if not skips:
            optimizers[1].step()
        optimizers[1].zero_grad()

    for number, (x, _) in enumerate(paceline.loader(samples(), BATCH // 2, world)):
        skips = number == 3 and world.rank + 1 == world.world_size
        with world.step():
            first(x).pow(2).mean().backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
            if blocks == "1":
                train(x, skips=skips)
        if blocks == "2":
            with world.step():
                train(x, skips=skips)


if __name__ == "__main__":
    main()
