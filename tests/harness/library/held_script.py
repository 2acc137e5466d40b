"""A script of one's own that waits in the middle of its run until the test releases it.

    python -m tests.harness.library.held_script PEER_TIMEOUT

The run folder is `runs/r`. Before step `HOLD`, each process waits for the file `../released`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import paceline
from tests.harness.library.small_training import BATCH, loss_of, network, samples
from tests.harness.processes.run_folders import wait_until

HOLD, EPOCHS, LIMIT = 16, 6, 120.0


def main() -> None:
    """Train as one process of the world."""
    with paceline.join("runs/r", peer_timeout=float(sys.argv[1])) as world:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        paceline.parallelize(model, optimizer, world, sync="allreduce")
        loader = paceline.loader(samples(), BATCH, world)
        for _ in range(loader.epoch, EPOCHS):
            for x, y in loader:
                if world.steps == HOLD:
                    wait_until(Path("../released").exists, LIMIT)
                with world.step():
                    loss_of(model, x, y).backward()
                    optimizer.step()
                    optimizer.zero_grad()


if __name__ == "__main__":
    main()
