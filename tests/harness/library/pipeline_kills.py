"""A pipeline of two stages whose processes kill themselves, each after so many of its places.

    python -m tests.harness.library.pipeline_kills RUN [MEMBER:PLACE …] [MEMBER:PLACE:wait …]

A place is before a step, in each microbatch's forward and backward, before and after the update,
in each microbatch of an evaluation after the step, and of one between two epochs, and behind that;
those of a process are counted from 1. At some places a process of the first generation waits until
a loss is known instead. A process that reaches the end has evaluated as plain torch does, and saves
the whole model's weights in a file named by its process id.
"""

from __future__ import annotations

import math
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
from paceline.api.world import World
from tests.harness.library.small_training import BATCH, SEED, samples, sgd, trained_alone
from tests.harness.processes.run_folders import wait_until

EPOCHS = 3
STAGES = 2
MICROBATCHES = 2
# Of a process without a loss: the last of an epoch's 5 batches has one sample a replica.
UPDATED_AT = 3 + 2 * MICROBATCHES  # the place after the first update
UNSEEN_AT = 4 * (3 + 3 * MICROBATCHES) + 3 + 3 + 1  # the first place of an epoch's evaluation
PLACES = EPOCHS * (UNSEEN_AT + MICROBATCHES)


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
    """Kills this process at a place, if that is its moment, or lets it wait there."""

    def __init__(self, world: World, moments: Sequence[str]) -> None:
        self._world = world
        self._member = world.rank
        self._moments = moments
        self._passed = 0

    def pass_place(self, *_: Any) -> None:
        """Count a place; a hook's arguments don't matter."""
        self._passed += 1
        moment = f"{self._member}:{self._passed}"
        if moment in self._moments:
            os.kill(os.getpid(), signal.SIGKILL)
        if f"{moment}:wait" in self._moments and not self._world.generation:
            context = self._world._run.context
            wait_until(lambda: context._interrupted, limit=60)


def main() -> None:
    """Train as one process of the world."""
    run, *moments = sys.argv[1:]
    with paceline.join(run, seed=SEED, timeout=30, mesh={"stage": STAGES}) as world:
        killer = Killer(world, moments)
        model = paceline.stages(
            whole(), world, loss=F.cross_entropy, microbatches=MICROBATCHES, cuts=["2"]
        )
        for block in [one for one in model.modules() if isinstance(one, nn.Tanh)]:
            block.register_forward_hook(killer.pass_place)
            block.register_full_backward_hook(killer.pass_place)
        optimizer = sgd(model)
        paceline.parallelize(model, optimizer, world, sync="notified", bucket_mb=1e-4)
        loader = paceline.loader(samples(), BATCH, world)
        unseen = paceline.loader(samples(BATCH), BATCH, world, train=False)
        meter = world.meter("loss")
        for _ in range(loader.epoch, EPOCHS):
            for x, y in loader:
                killer.pass_place()
                with world.step():
                    model.train_batch(x, y)
                    killer.pass_place()
                    optimizer.step()
                    optimizer.zero_grad()
                    killer.pass_place()
                with torch.no_grad():
                    model(x)
            model.eval()
            for x, y in world.evaluation(unseen):
                meter.add(loss=F.cross_entropy(model(x), y, reduction="sum"))
            model.train()
            killer.pass_place()
        alone = whole()
        alone.load_state_dict(model.whole_state_dict())
        x, y = samples(BATCH)[:]
        expected = F.cross_entropy(alone(x), y, reduction="sum").item()
        assert math.isclose(meter.sums()["loss"], expected, rel_tol=1e-9)
        torch.save(alone.state_dict(), f"weights.{os.getpid()}.pt")


if __name__ == "__main__":
    Path("runs").mkdir(exist_ok=True)
    main()
