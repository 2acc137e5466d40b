"""A loop with an evaluation, meters and counters of its own, in which a process kills itself.

    python -m tests.harness.library.kills_script RUN [--seed S] [--kills K]

Each kill is drawn by the seed: which process, by its first rank, and after how many of that
process's places, which are in every part of the loop: before, in and after a step, in the
evaluation and after it, between two epochs. A process that reaches the end prints one line:
counters exactly, sums with all digits. In float64 they are those of the run without kills, to
rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline

EPOCHS, SAMPLES, BATCH, TEST = 3, 60, 6, 31
RANKS = 4
PLACES = 4 * EPOCHS * SAMPLES // BATCH  # about those of a process, of which some come later


class Counter:
    """A counter of the script, which `world.track()` lets go back with the model."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Killer:
    """Kills this process at a place of its loop.

    Args:
        rank: the process's first rank.
        seed: of the kills.
        kills: how many there are in all, each of another process.
    """

    def __init__(self, rank: int, seed: int, kills: int) -> None:
        draw = random.Random(seed)
        victims = draw.sample(range(RANKS), kills)
        moments = {victim: draw.randrange(PLACES) for victim in victims}
        self._left = moments.get(rank, -1)

    def pass_place(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(SAMPLES + TEST, 4, dtype=torch.float64)
    y = x.sum(dim=1, keepdim=True)
    train_data = TensorDataset(x[:SAMPLES], y[:SAMPLES])
    test_data = TensorDataset(x[SAMPLES:], y[SAMPLES:])

    world = paceline.join(options.run, timeout=20)
    killer = Killer(world.rank, options.seed, options.kills)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    paceline.parallelize(model, optimizer, world)
    counter = Counter()
    world.track(counter=counter)
    losses = world.meter("loss", "samples")
    held = world.meter("loss", "samples")
    loader = paceline.loader(train_data, BATCH, world)
    test = paceline.loader(test_data, BATCH, world, train=False)
    found = []
    for epoch in range(loader.epoch, EPOCHS):
        for inputs, targets in loader:
            killer.pass_place()
            for group in optimizer.param_groups:
                group["lr"] = 0.05 / (1 + 0.1 * world.steps)
            with world.step() as step:
                loss = ((model(inputs) - targets) ** 2).sum()
                killer.pass_place()
                (loss / len(inputs)).backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.add(loss=loss, samples=len(inputs))
            killer.pass_place()
            if step.done:
                counter.count += 1
        model.eval()
        with torch.no_grad():
            for inputs, targets in world.evaluation(test):
                killer.pass_place()
                held.add(loss=((model(inputs) - targets) ** 2).sum(), samples=len(inputs))
        model.train()
        killer.pass_place()
        alike = int(world.total(torch.ones(1))) == world.world_size
        sums = [losses.sums(), held.sums()]
        found.append([epoch, world.steps, counter.count, alike, sums])
        killer.pass_place()
    world.settle()
    weights = float(sum(value.sum() for value in model.state_dict().values()))
    print(json.dumps({"found": found, "weights": weights}), flush=True)
    world.close()


if __name__ == "__main__":
    main()
