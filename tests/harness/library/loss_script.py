"""A script with a loop of its own, in the middle of which a test kills processes.

    python -m tests.harness.library.loss_script RUN [last]

No process leaves step `LAST_KILL` before the file `killed` exists, so that a kill is always in the
middle of the run. With `last`, rank 0 kills itself instead, when it begins to write the state after
the last step. Each process that trains to the end prints the sum of its weights.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.state.checkpoint_files import Checkpoints
from tests.harness.processes.run_folders import wait_until

EPOCHS, STEPS, BATCH, LAST_KILL = 4, 10, 6, 20


def kill_in_last_write() -> None:
    """Let this process kill itself when it begins to write the last checkpoint."""
    write = Checkpoints.write

    def killed(self: Checkpoints, step: int, *args: Any, **named: Any) -> Path:
        if step == EPOCHS * STEPS:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(self, step, *args, **named)

    Checkpoints.write = killed  # type: ignore[method-assign]


def main(run: Path, *, last: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(STEPS * BATCH, 4, dtype=torch.float64)
    data = TensorDataset(x, x.sum(dim=1, keepdim=True))
    world = paceline.join(run=run)
    if last and world.rank == 0:
        kill_in_last_write()
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = paceline.parallelize(model, optimizer, world)
    loader = paceline.loader(data, batch_size=BATCH, world=world)
    for _ in range(loader.epoch, EPOCHS):
        for inputs, targets in loader:
            if world.steps == LAST_KILL and not last:
                wait_until(Path("killed").exists)
            with world.step():
                ((model(inputs) - targets) ** 2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    world.settle()
    total = sum(float(value.sum()) for value in model.state_dict().values())
    print(f"weights {total:.10f}", flush=True)
    world.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), last="last" in sys.argv[2:])
