"""A small training loop of the library in several ways, and the same in plain torch.

    python benchmarks/gpu_loop.py --device cuda:0 --out FOLDER CASE …       as a world of one
    paceline launch -n 2 -- python benchmarks/gpu_loop.py …                 as a world of two

Each rank writes what it has trained to `FOLDER/CASE.RANK.pt`. The cases `resumed` and `lost` kill
their own process in a step: `resumed` once a checkpoint is on the disk, `lost` on rank 1.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from command_line import Options, run_script
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import paceline
from paceline.api.world import World
from paceline.state.checkpoint_files import FOLDER as CHECKPOINTS

STEPS, BATCH, FEATURES, CLASSES = 40, 24, 16, 4
KILL_AT, SAVE_EVERY, FILE_LIMIT = 21, 8, 20.0  # steps, steps, seconds
SCALE, BACKOFF = 2.0**24, 2.0**-10  # the first is too large by far, the second small enough


@dataclass(frozen=True, kw_only=True)
class Case:
    """A way to train.

    Attributes:
        sync, wire: arguments of `paceline.parallelize`.
        dtype: of parameters and samples.
        half: forward and backward are in float16, and a scaler scales the loss.
        momentum: of SGD.
        kills: the rank that kills itself in step KILL_AT; -1: none.
        watched: the steps in which the device reports waits, by torch's debug mode.
    """

    sync: str = "notified"
    wire: str = "fp32"
    dtype: torch.dtype = torch.float64
    half: bool = False
    momentum: float = 0.9
    kills: int = -1
    watched: range = range(0)


CASES: Mapping[str, Case] = {
    "float64": Case(),
    "fp16": Case(dtype=torch.float32, half=True),
    "fp32": Case(dtype=torch.float32),
    "bf16-wire": Case(dtype=torch.float32, wire="bf16"),
    "int8-wire": Case(dtype=torch.float32, wire="int8"),
    "average": Case(sync="average:every=1,delay=0", momentum=0.0),
    "auto": Case(sync="auto"),
    "resumed": Case(kills=0),
    "lost": Case(kills=1),
    "waits": Case(dtype=torch.float32, watched=range(20, 23)),
}


class Training:
    """Model, optimizer, scaler and samples of a case, alike on all devices.

    Args:
        case: the way to train.
        device: where.
    """

    def __init__(self, case: Case, device: torch.device) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(FEATURES, 48), nn.Tanh(), nn.Linear(48, CLASSES))
        inputs = torch.randn(STEPS * BATCH, FEATURES, dtype=torch.float64)
        targets = torch.randint(CLASSES, (STEPS * BATCH,))
        self.case, self.device = case, device
        self.model = model.to(device=device, dtype=case.dtype)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=case.momentum)
        self.samples = TensorDataset(inputs.to(case.dtype), targets)
        self.scaler = torch.amp.GradScaler(
            device.type, init_scale=SCALE, backoff_factor=BACKOFF, enabled=case.half
        )

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        """Train one batch, as a script does."""
        inputs = inputs.to(self.device, non_blocking=True)
        targets = targets.to(self.device, non_blocking=True)
        with torch.autocast(self.device.type, torch.float16, enabled=self.case.half):
            loss = functional.cross_entropy(self.model(inputs), targets)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def result(self) -> dict[str, Any]:
        """Return the weights as one vector, and the loss scale."""
        weights = torch.cat([p.detach().flatten() for p in self.model.parameters()]).cpu()
        return {"weights": weights, "scale": self.scaler.get_scale()}


def plain(case: Case, device: torch.device) -> dict[str, Any]:
    """Train a case in plain torch, in one process."""
    training = Training(case, device)
    for first in range(0, STEPS * BATCH, BATCH):
        training.step(*training.samples[first : first + BATCH])
    return training.result()


def train(name: str, device: str, run: Path | None = None) -> dict[str, Any]:
    """Train a case by the library, as the rank of a world that this process is.

    Args:
        name: the case's.
        device: where.
        run: the run's folder, of a case that resumes.

    Returns:
        what `Training.result` returns, with the rank, the number of ranks at the end, and the step
        at which the loop began.
    """
    case = CASES[name]
    with paceline.join(run, device=device, checkpoint_steps=SAVE_EVERY if run else 0) as world:
        training = Training(case, world.device)
        paceline.parallelize(
            training.model,
            training.optimizer,
            world,
            sync=case.sync,
            wire=case.wire,
            bucket_mb=0.0 if case.sync == "auto" else 0.002,  # several buckets, or its own choice
        )
        if case.half:
            world.track(training.scaler)
        pinned = world.device.type == "cuda"
        loader = paceline.loader(training.samples, BATCH, world, shuffle=False, pin_memory=pinned)
        began = world.steps
        for _ in range(loader.epoch, 1):
            for inputs, targets in loader:
                _watch(case, world)
                with world.step():
                    _kill(case, world, run)
                    training.step(inputs, targets)
        world.merge()
        result = training.result()
        result.update(rank=world.rank, world_size=world.world_size, began=began)
    return result


def _watch(case: Case, world: World) -> None:
    """Let torch raise an error at each operation that waits for the GPU, in some steps."""
    if world.steps == case.watched.start and case.watched:
        torch.cuda.set_sync_debug_mode("error")
    if world.steps == case.watched.stop and case.watched:
        torch.cuda.set_sync_debug_mode("default")
        print("three steps without a wait", flush=True)


def _kill(case: Case, world: World, run: Path | None) -> None:
    """Kill this process, where the case wants that; once, as a resumed run is a new generation."""
    if world.steps != KILL_AT or world.rank != case.kills or world.generation:
        return
    end = time.monotonic() + FILE_LIMIT
    while world.world_size == 1 and not list((run or Path()).glob(f"{CHECKPOINTS}/step-*.pt")):
        if time.monotonic() > end:
            raise SystemExit(f"no checkpoint within {FILE_LIMIT:g} s")
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = Options(__doc__)
    parser.add("--device", required=True)
    parser.add("--out", type=Path, required=True)
    parser.add("--run", type=Path)
    parser.add("cases", nargs="+", choices=CASES)
    options = parser.parse_args()
    for name in options.cases:
        result = train(name, options.device, options.run)
        torch.save(result, options.out / f"{name}.{result['rank']}.pt")


if __name__ == "__main__":
    run_script(main)
