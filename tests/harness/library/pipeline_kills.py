"""A pipeline of two stages whose processes kill themselves, each after so many of its places.

    python -m tests.harness.library.pipeline_kills RUN [MEMBER:PLACE …]

A place is before a step, in each microbatch's forward and backward, before and after the update,
and between two epochs; those of a process are counted from 1. A process that reaches the end saves
the whole model's weights in a file named by its process id.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline
from tests.harness.library.small_training import BATCH, SEED, samples, sgd, trained_alone

EPOCHS = 3
STAGES = 2
MICROBATCHES = 2
# Of a process without a loss: the last of an epoch's 5 batches has one sample a replica.
PLACES = EPOCHS * (4 * (3 + 2 * MICROBATCHES) + 3 + 2 + 1)


def whole() -> nn.Sequential:
    """Make the whole model, the same at each call."""
    torch.manual_seed(7)
    layers = [nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3)]
    return nn.Sequential(*layers).double()


def whole_alone() -> dict[str, Tensor]:
    """Train the whole model by plain torch; return its state."""
    model = whole()
    return trained_alone(model, sgd(model), EPOCHS)


class Killer:
    """Kills this process at a place, if that is its moment."""

    def __init__(self, member: int, moments: Sequence[str]) -> None:
        places = dict(tuple(map(int, moment.split(":"))) for moment in moments)
        self._left = places.get(member, -1)

    def pass_place(self, *_: Any) -> None:
        """Count a place; a hook's arguments don't matter."""
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Train as one process of the world."""
    run, *moments = sys.argv[1:]
    with paceline.join(run, seed=SEED, timeout=30, mesh={"stage": STAGES}) as world:
        killer = Killer(world.rank, moments)
        model = paceline.stages(
            whole(), world, loss=F.cross_entropy, microbatches=MICROBATCHES, cuts=["2"]
        )
        for block in [one for one in model.modules() if isinstance(one, nn.Tanh)]:
            block.register_forward_hook(killer.pass_place)
            block.register_full_backward_hook(killer.pass_place)
        optimizer = sgd(model)
        paceline.parallelize(model, optimizer, world, sync="notified", bucket_mb=1e-4)
        loader = paceline.loader(samples(), BATCH, world)
        for _ in range(loader.epoch, EPOCHS):
            for x, y in loader:
                killer.pass_place()
                with world.step():
                    model.train_batch(x, y)
                    killer.pass_place()
                    optimizer.step()
                    optimizer.zero_grad()
                    killer.pass_place()
            killer.pass_place()
        torch.save(model.whole_state_dict(), f"weights.{os.getpid()}.pt")


if __name__ == "__main__":
    Path("runs").mkdir(exist_ok=True)
    main()
