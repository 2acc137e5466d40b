"""A script whose layers two processes divide, in stages or whole; compared with plain torch.

    python -m tests.harness.library.mesh_script RUN STAGES [all:STEP|one:STEP]

With STAGES 0 the model isn't cut. Before that step all processes kill themselves, or the one that
began as rank 1. Each process prints how far its weights are from those of one process.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline
from tests.harness.library.small_training import BATCH, SEED, adamw, copied, samples, trained_alone
from tests.harness.library.tensor_script import distance

EPOCHS = 2
CLIP = 0.3
PLAN = {"*.up": "colwise", "*.down": "rowwise"}


class Layer(nn.Module):
    """Feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 16)
        self.down = nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 6) to the same shape."""
        result: Tensor = x + self.down(self.up(x).tanh())
        return result


def whole() -> nn.Sequential:
    """Make the whole model, the same at each call."""
    torch.manual_seed(7)
    return nn.Sequential(Layer(), Layer(), nn.Linear(6, 3)).double()


def main() -> None:
    """Train as one process of the world."""
    run, count, *deaths = sys.argv[1:]
    stages = int(count)
    mesh = {"stage": stages, "tensor": 2} if stages else {"tensor": 2}
    with paceline.join(run, seed=SEED, timeout=60, mesh=mesh, checkpoint_steps=2) as world:
        member = world.rank
        model: nn.Module = whole()
        cut = None
        if stages:
            cut = paceline.stages(model, world, loss=F.cross_entropy, microbatches=2, cuts=["1"])
        model = cut or model
        paceline.tensor_parallel(model, world, PLAN)
        optimizer = adamw(model)
        paceline.parallelize(model, optimizer, world, sync="notified", bucket_mb=1e-4)
        loader = paceline.loader(samples(), BATCH, world)
        for _ in range(loader.epoch, EPOCHS):
            for x, y in loader:
                with world.step():
                    step = world.steps
                    if f"all:{step}" in deaths or (member == 1 and f"one:{step}" in deaths):
                        os.kill(os.getpid(), signal.SIGKILL)
                    if cut:
                        cut.train_batch(x, y)
                    else:
                        F.cross_entropy(model(x), y).backward()
                    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                    optimizer.step()
                    optimizer.zero_grad()
        found = cut.whole_state_dict() if cut else copied(model)
        rank = world.coordinate("tensor")
    alone = whole()
    expected = trained_alone(alone, adamw(alone), EPOCHS, clip=CLIP)
    assert [*found] == [*expected]
    print(f"{distance(found, expected, rank):.1e} off", flush=True)


if __name__ == "__main__":
    main()
