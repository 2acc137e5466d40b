"""A script whose weights are averaged, with a tracked schedule that cycles the momentum.

    averaged_script FOLDER STOP

It ends with status 3 before step STOP; -1: it trains to the end, and writes each rank's own
weights and momenta to FOLDER/rank.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline

EPOCHS = 2


def main() -> None:
    folder, stop = Path(sys.argv[1]), int(sys.argv[2])
    with paceline.join(folder / "run", checkpoint_steps=1) as world:
        torch.manual_seed(3)
        model: nn.Module = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        average = paceline.Average(every=6, delay=4, momenta="average")
        model, optimizer = paceline.parallelize(model, optimizer, world, sync=average)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=30)
        world.track(schedule)
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(96, 6, generator=generator)
        labels = torch.randint(0, 4, (96,), generator=generator)
        loader = paceline.loader(TensorDataset(images, labels), 8, world)
        for _ in range(loader.epoch, EPOCHS):
            for x, y in loader:
                if world.steps == stop:
                    sys.exit(3)
                with world.step():
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                schedule.step()
        model.train()
        own = [p.detach().clone() for p in model.parameters()]
        momenta = [optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()]
        torch.save([*own, *momenta], folder / f"{world.rank}.pt")
        world.merge()


if __name__ == "__main__":
    main()
