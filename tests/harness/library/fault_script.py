"""A script whose processes kill themselves, each at a moment of its own; the others continue.

    python -m tests.harness.library.fault_script CASE MOMENT …

A moment is GENERATION:EPOCH:BATCH:NAME:RANK. Each process saves its last weights in a file named by
its process id. The run folder is `runs/CASE`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

import paceline
from paceline.api.world import World
from tests.harness.library.small_training import BATCH, loss_of, network, samples

EPOCHS = 4


@dataclass(frozen=True)
class Moment:
    """A moment of a rank in a generation of the run."""

    generation: int
    epoch: int
    batch: int
    name: str
    rank: int

    @classmethod
    def of(cls, text: str) -> Self:
        generation, epoch, batch, name, rank = text.split(":")
        return cls(int(generation), int(epoch), int(batch), name, int(rank))


@dataclass(frozen=True)
class Case:
    """A way to train.

    Attributes:
        arguments: of `paceline.parallelize`.
        accumulate: batches a step.
        scaled: whether a loss scaler is used.
        totals: whether the ranks sum what they counted in an evaluation.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    accumulate: int = 1
    scaled: bool = False
    totals: bool = False


NOTIFIED = {"sync": "notified", "bucket_mb": 1e-4}
CASES = {
    "accumulation": Case(NOTIFIED, accumulate=2, scaled=True),
    "sharded": Case({**NOTIFIED, "update": "sharded"}),
    "allreduce": Case({"sync": "allreduce"}),
    "totals": Case({"sync": "allreduce"}, totals=True),
}


class Deaths:
    """The moments at which processes of the world kill themselves."""

    def __init__(self, world: World, moments: Sequence[Moment]) -> None:
        self._world, self._moments = world, moments

    def pass_by(self, name: str, epoch: int, batch: int = 0) -> None:
        """Kill this process, if this is its moment."""
        world = self._world
        if Moment(world.generation, epoch, batch, name, world.rank) in self._moments:
            os.kill(os.getpid(), signal.SIGKILL)


def train(case: Case, world: World, deaths: Deaths) -> nn.Module:
    """Train; return the model."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    paceline.parallelize(model, optimizer, world, **case.arguments)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    scaler = torch.amp.GradScaler("cpu", enabled=case.scaled, growth_interval=3)
    world.track(schedule, scaler)
    loader = paceline.loader(samples(), BATCH, world)
    test = paceline.loader(samples(), BATCH, world, train=False)
    for epoch in range(loader.epoch, EPOCHS):
        for x, y in loader:
            batch = loader.step
            if (batch + 1) % case.accumulate and batch + 1 < len(loader):
                with world.no_sync():
                    (scaler.scale(loss_of(model, x, y)) / case.accumulate).backward()
                    deaths.pass_by("accumulated", epoch, batch)
                continue
            with world.step():
                loss = loss_of(model, x, y) / case.accumulate
                deaths.pass_by("forward", epoch, batch)
                scaler.scale(loss).backward()
                deaths.pass_by("backward", epoch, batch)
                if case.scaled:
                    world.reduce()
                    scaler.unscale_(optimizer)
                    deaths.pass_by("unscaled", epoch, batch)
                scaler.step(optimizer)
                deaths.pass_by("updated", epoch, batch)
                scaler.update()
                optimizer.zero_grad()
            deaths.pass_by("between", epoch, batch)
            schedule.step()
        evaluate(case, model, world, deaths, test, epoch)
    return model


@torch.no_grad()
def evaluate(
    case: Case, model: nn.Module, world: World, deaths: Deaths, test: Any, epoch: int
) -> None:
    """Evaluate this rank's share of the data."""
    right = torch.zeros((), dtype=torch.int64)
    for x, y in test:
        right += (model(x).argmax(1) == y).sum()
        deaths.pass_by("evaluation", epoch)
    deaths.pass_by("total", epoch)
    if case.totals:
        print(f"epoch {epoch}: {world.total(right).item()} are right", flush=True)


def main() -> None:
    """Train as one process of the world."""
    name, *texts = sys.argv[1:]
    with paceline.join(Path("runs", name), timeout=30) as world:
        deaths = Deaths(world, [Moment.of(text) for text in texts])
        model = train(CASES[name], world, deaths)
    torch.save(model.state_dict(), f"weights.{os.getpid()}.pt")


if __name__ == "__main__":
    main()
