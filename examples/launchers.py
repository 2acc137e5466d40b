"""One script under every launcher, with the same losses.

python examples/launchers.py
paceline launch -n 2 -- python examples/launchers.py
torchrun --nproc-per-node 2 examples/launchers.py
mpirun -n 2 python examples/launchers.py
srun -n 2 python examples/launchers.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline

EPOCHS, BATCH = 4, 48


def main() -> None:
    """Fit random labels; rank 0 prints each epoch's mean loss."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(500, 16).double(), torch.randint(0, 4, (500,)))
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    world = paceline.join()
    paceline.parallelize(model.to(world.device), optimizer, world)
    loader = paceline.loader(data, BATCH, world)
    for epoch in range(EPOCHS):
        loss_sum = torch.zeros((), dtype=torch.float64)
        for x, y in loader:
            x, y = x.to(world.device), y.to(world.device)
            with world.step():
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            loss_sum += loss.item() * loader.count
        mean = world.total(loss_sum).item() / loader.samples
        if world.rank == 0:
            print(f"epoch {epoch}: loss {mean:.12f}", flush=True)


if __name__ == "__main__":
    main()
