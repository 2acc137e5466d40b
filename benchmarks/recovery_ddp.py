"""A training by plain DDP that torchrun restarts, with a checkpoint in each S-th step.

    torchrun --nproc-per-node 4 --max-restarts 3 benchmarks/recovery_ddp.py --folder F --every S

It is what the documentation of torchrun recommends: rank 0 writes a checkpoint now and then, and
each start resumes from the newest one. Each worker appends a line a step, as the step begins, to
`steps.<restart>.<rank>.jsonl`: its number, and the moment by the machine's monotonic clock.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from command_line import Options, run_script
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from paceline.models.zoo import build_model


def main() -> None:
    parser = Options(__doc__)
    parser.add("--folder", type=Path, required=True)
    parser.add("--model", default="resnet20")
    parser.add("--image-size", type=int, default=32)
    parser.add("--labels", type=int, default=10)
    parser.add("--batch", type=int, default=64, help="images a step of all workers")
    parser.add("--every", type=int, default=10, help="steps between checkpoints")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    train(options, dist.get_rank(), dist.get_world_size())


def train(options: argparse.Namespace, rank: int, size: int) -> None:
    """Train until the process is killed."""
    torch.manual_seed(1)
    model = build_model(options.model, num_labels=options.labels, num_channels=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    checkpoint, step = options.folder / "checkpoint.pt", 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    replica = DistributedDataParallel(model)
    images = torch.randn(options.batch // size, 3, options.image_size, options.image_size)
    labels = torch.randint(0, options.labels, (len(images),))
    restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
    with (options.folder / f"steps.{restart}.{rank}.jsonl").open("w", buffering=1) as lines:
        while True:
            begun = {"step": step, "at": time.monotonic(), "pid": os.getpid()}
            lines.write(json.dumps(begun) + "\n")
            F.cross_entropy(replica(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % options.every == 0 and rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                new = checkpoint.with_suffix(".new")
                torch.save({**state, "step": step}, new)
                new.rename(checkpoint)


if __name__ == "__main__":
    run_script(main)
