"""A script of two stages, each of which trains a model of its own on the samples of its replica.

    python -m tests.harness.library.stage_script SYNC [DEATH …]

A death is GENERATION:EPOCH:BATCH:MEMBER: the process that began as rank MEMBER kills itself in that
step; with +OTHER behind it, it kills the one that began as rank OTHER first. Each process saves its
last weights in a file named by its stage and its process id. The run
folder is `runs/stages`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

import paceline
from tests.harness.library.small_training import (
    BATCH,
    SEED,
    adamw,
    copied,
    loss_of,
    samples,
    trained_alone,
)
from tests.harness.processes.run_folders import wait_until

EPOCHS = 3
STAGES = 2
INDEXES = "runs/stages/checkpoints/step-*.json"
HERE = (Path(), Path("..", "machine0"))
WAYS = {
    "allreduce": {"sync": "allreduce"},
    "notified": {"sync": "notified", "bucket_mb": 1e-4},
    "sharded": {"sync": "notified", "update": "sharded", "bucket_mb": 1e-4},
}


def part(stage: int) -> nn.Sequential:
    """Make a stage's model; the stages' have other shapes."""
    torch.manual_seed(10 + stage)
    width = 8 + stage
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3)).double()


def stage_alone(stage: int) -> dict[str, Tensor]:
    """Train a stage's model by plain torch; return its state."""
    model = part(stage)
    return trained_alone(model, adamw(model), EPOCHS)


def kill(own: str, deaths: Sequence[str]) -> None:
    """Kill this process, if one of the deaths is its own.

    After the first epoch it waits until a checkpoint is whole: until its index is here, or in the
    folder that stands for the first machine.
    """
    for death in deaths:
        named, _, other = death.partition("+")
        if named == own:
            if named.split(":")[1] != "0":
                wait_until(lambda: any(chain(*(each.glob(INDEXES) for each in HERE))), limit=20)
            if other:
                os.kill(int(Path(f"pid.{other}").read_text()), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Train as one process of the world."""
    way, *deaths = sys.argv[1:]
    folder = Path("runs", "stages")
    stages = [int(word.removeprefix("stages=")) for word in deaths if word.startswith("stages=")]
    mesh = {"stage": (stages or [STAGES])[0]}
    with paceline.join(folder, seed=SEED, timeout=30, mesh=mesh, checkpoint_steps=2) as world:
        member = world.rank
        Path(f"pid.{member}").write_text(str(os.getpid()))
        stage = world.coordinate("stage")
        model = part(stage)
        optimizer = adamw(model)
        paceline.parallelize(model, optimizer, world, **WAYS[way])  # type: ignore[arg-type]
        meter = world.meter("samples")
        loader = paceline.loader(samples(), BATCH, world)
        for epoch in range(loader.epoch, EPOCHS):
            for x, y in loader:
                with world.step():
                    if not world.steps:
                        print(f"drawn {torch.rand(()).item()}", flush=True)
                    kill(f"{world.generation}:{epoch}:{loader.step}:{member}", deaths)
                    loss_of(model, x, y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    meter.add(samples=len(x))
            counted = world.total(torch.tensor(1)).item()
            print(f"epoch {epoch}: {meter.sums()['samples']:g} of {counted} replicas", flush=True)
    torch.save(copied(model), f"weights.{stage}.{os.getpid()}.pt")


if __name__ == "__main__":
    main()
