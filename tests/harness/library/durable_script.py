"""A script of three ranks, of which rank 0 kills the others at once: their shards are lost.

    python -m tests.harness.library.durable_script RUN STEP

It trains without a kill first, and then with one before a step. It prints "close" if the weights
that rank 0 trains alone from the checkpoint are those of the three, to 1e-10.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from torch import Tensor

import paceline
from paceline.api.world import World
from tests.harness.library.small_training import BATCH, loss_of, network, samples
from tests.harness.processes.run_folders import wait_until

EPOCHS, LIMIT = 3, 60.0


def train(run: Path | None, kill_at: int) -> Tensor:
    """Train; return all weights, and the rate of the schedule."""
    world = paceline.join(run, timeout=20, checkpoint_steps=2)
    model = network(norm=False, words=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    paceline.parallelize(model, optimizer, world, sync="notified", update="sharded", bucket_mb=1e-4)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    world.track(schedule)
    loader = paceline.loader(samples(), BATCH, world)
    pids = torch.zeros(world.world_size, dtype=torch.int64)
    pids[world.rank] = os.getpid()
    others = world.total(pids).tolist()[1:]
    for _ in range(EPOCHS):
        for x, y in loader:
            if world.steps == kill_at and world.generation == 0 and world.rank == 0:
                kill(world, run, others)
            with world.step():
                loss = loss_of(model, x, y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
    world.settle()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    world.close()
    return torch.cat([weights, torch.tensor(schedule.get_last_lr(), dtype=weights.dtype)])


def kill(world: World, run: Path | None, pids: list[int]) -> None:
    """Kill processes, once there is a checkpoint of the epoch."""
    if run is not None and world.epoch:
        first = world.epoch * 5  # steps of an epoch
        files = run / "checkpoints"
        wait_until(
            lambda: any(int(path.stem[5:]) >= first for path in files.glob("step-*.pt")), LIMIT
        )
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Train twice, and compare."""
    run, kill_at = sys.argv[1:]
    plain = train(None, -1)
    broken = train(Path(run) if run else None, int(kill_at))
    print("close" if (plain - broken).abs().max() < 1e-10 else "other weights", flush=True)


if __name__ == "__main__":
    main()
