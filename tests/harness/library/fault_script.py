"""A script whose processes kill themselves, each at a moment of its own; the others continue.

    python -m tests.harness.library.fault_script CASE MOMENT …

A moment is GENERATION:EPOCH:BATCH:NAME:RANK. At those named `late_…` an operation of that rank
fails where the others' doesn't (`late_ranks.py`), and no process is killed. Each process saves its
last weights in a file named by its process id. The run folder is `runs/CASE`.
"""

from __future__ import annotations

import copy
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
from tests.harness.library.late_ranks import fail_after
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
        surviving: whether the evaluation outlives lost ranks.
        each: batches between two evaluations; 0: one after each epoch.
        twice: whether two evaluations follow each other.
        use: a use of the model after each step: "copy" of it, its "state", "settle" or
            "checkpoint"; "": none.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    accumulate: int = 1
    scaled: bool = False
    totals: bool = False
    surviving: bool = False
    each: int = 0
    twice: bool = False
    use: str = ""


NOTIFIED = {"sync": "notified", "bucket_mb": 1e-4}
CASES = {
    "accumulation": Case(NOTIFIED, accumulate=2, scaled=True),
    "sharded": Case({**NOTIFIED, "update": "sharded"}),
    "allreduce": Case({"sync": "allreduce"}),
    "totals": Case({"sync": "allreduce"}, totals=True),
    "totals_within": Case({"sync": "allreduce"}, totals=True, each=3),
    "evaluation": Case({**NOTIFIED, "update": "sharded"}, totals=True, surviving=True),
    "twice": Case({"sync": "allreduce"}, totals=True, surviving=True, twice=True),
    "copy": Case({**NOTIFIED, "update": "sharded"}, use="copy"),
    "state": Case(NOTIFIED, use="state"),
    "settle": Case(NOTIFIED, use="settle"),
    "checkpoint": Case({"sync": "allreduce"}, use="checkpoint"),
    "untold_twice": Case({"sync": "allreduce"}, surviving=True, twice=True),
    "untold": Case({"sync": "allreduce"}, surviving=True),
    "within": Case({"sync": "allreduce"}, totals=True, surviving=True, each=3),
}


class Deaths:
    """The moments at which processes of the world kill themselves."""

    def __init__(self, world: World, moments: Sequence[Moment]) -> None:
        self._world, self._moments = world, moments

    def pass_by(self, name: str, epoch: int, batch: int = 0) -> None:
        """Kill this process, if this is its moment."""
        if self._is_due(name, epoch, batch):
            os.kill(os.getpid(), signal.SIGKILL)

    def let_be_late(self, place: str, epoch: int) -> None:
        """Let this rank's operation at a place fail, if this is its moment."""
        if self._is_due(f"late_{place}", epoch, 0):
            fail_after(self._world, place)

    def _is_due(self, name: str, epoch: int, batch: int) -> bool:
        world = self._world
        return Moment(world.generation, epoch, batch, name, world.rank) in self._moments


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
            deaths.pass_by("batch", epoch, batch)
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
            if batch == 0:
                deaths.let_be_late("epoch_end", epoch)
            use(case.use, model, optimizer, world)
            deaths.pass_by("between", epoch, batch)
            schedule.step()
            if case.each and (batch + 1) % case.each == 0:
                evaluate(case, model, world, deaths, test, epoch, batch)
        deaths.pass_by("ended", epoch)
        deaths.let_be_late("evaluation", epoch)
        deaths.let_be_late("begin", epoch)
        evaluate(case, model, world, deaths, test, epoch)
        if case.twice:
            evaluate(case, model, world, deaths, test, epoch, 1)
    return model


def use(how: str, model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
    """Use a model after a step."""
    if how == "copy":
        copy.deepcopy(model)
    elif how == "state":
        model.state_dict(), optimizer.state_dict()
    elif how == "settle":
        world.settle()
    elif how == "checkpoint":
        world.checkpoint()


@torch.no_grad()
def evaluate(
    case: Case,
    model: nn.Module,
    world: World,
    deaths: Deaths,
    test: Any,
    epoch: int,
    batch: int = 0,
) -> None:
    """Evaluate this rank's share of the data."""
    right, count = torch.zeros((), dtype=torch.float64), torch.zeros(())
    if case.totals and not case.surviving:
        world.total(count)  # no rank is in a step any more, whose loss they would survive
    for x, y in world.evaluation(test) if case.surviving else test:
        right += loss_of(model, x, y) * len(x)
        count += len(x)
        deaths.pass_by("evaluation", epoch, batch)
    deaths.pass_by("total", epoch, batch)
    if case.totals:
        loss, samples = world.total(right).item(), int(world.total(count).item())
        print(
            f"epoch {epoch}, batch {batch}: a loss of {loss:.9f} of {samples} samples", flush=True
        )
    if batch == 0:
        deaths.pass_by("evaluated", epoch)
        deaths.let_be_late("next_epoch", epoch)


def main() -> None:
    """Train as one process of the world."""
    name, *texts = sys.argv[1:]
    with paceline.join(Path("runs", name), timeout=30) as world:
        deaths = Deaths(world, [Moment.of(text) for text in texts])
        model = train(CASES[name], world, deaths)
    torch.save(model.state_dict(), f"weights.{os.getpid()}.pt")


if __name__ == "__main__":
    main()
