"""A script whose generations end in mid-step, in all ranks at moments of their own.

    python -m tests.harness.library.rollback_script CASE …

It trains each case without and with such ends, and prints the case with "equal" where all bits of
weights, optimizer and loss scale are. Its processes agree on the next generation by the store.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import paceline
from paceline.api.world import World
from paceline.cluster.membership.generation import Group
from paceline.errors import CommError
from paceline.run.steps import Successor
from paceline.state.snapshots import SnapshotName
from tests.harness.library.small_training import BATCH, loss_of, network, samples

RANKS, EPOCHS, STEPS = 2, 3, 5
Moment = tuple[int, str]


@dataclass(frozen=True)
class Case:
    """A way to train.

    Attributes:
        arguments: of `paceline.parallelize`.
        accumulate: batches a step.
        scaled: whether a loss scaler is used.
        freeze: the step before which the first layer is frozen; -1: none.
        at: the moments at which a generation may end.
    """

    arguments: dict[str, Any]
    accumulate: int = 1
    scaled: bool = False
    freeze: int = -1
    at: tuple[str, ...] = ("begin", "forward", "backward", "update", "end")


NOTIFIED = {"sync": "notified", "bucket_mb": 1e-4}
CASES = {
    "allreduce": Case({"sync": "allreduce"}),
    "notified": Case(NOTIFIED),
    "sharded": Case({**NOTIFIED, "update": "sharded"}),
    "sync_bn": Case({**NOTIFIED, "sync_bn": True}),
    "accumulation": Case(NOTIFIED, accumulate=2, at=("begin", "accumulated", "backward", "end")),
    "loss scaling": Case(NOTIFIED, scaled=True, at=("backward", "unscaled", "update")),
    "frozen layers": Case(NOTIFIED, freeze=6),
    "auto": Case({"sync": "auto"}),
}


class Breaks:
    """The moments at which this rank's generations end, one each."""

    def __init__(self, world: World, moments: Sequence[Moment]) -> None:
        self._world, self._moments, self.generation = world, moments, 0

    def pass_by(self, name: str) -> None:
        """End the generation, if this is its moment."""
        moment = dict(enumerate(self._moments)).get(self.generation)
        if moment == (self._world.steps, name):
            raise CommError(f"broken off: {name}")


def next_generation(
    world: World, breaks: Breaks
) -> Callable[[CommError, Sequence[SnapshotName]], Successor]:
    """Return what decides on the next generation, with the same members."""
    store = world._session.joined.store

    def decide(error: CommError, held: Sequence[SnapshotName]) -> Successor:
        group, run = world._run.context.group, world._run
        breaks.generation += 1
        prefix = f"{group.generation.key_prefix}/next"
        store.set(f"{prefix}/{group.rank}", json.dumps(held))
        texts = [store.get(f"{prefix}/{rank}") for rank in range(group.size)]
        of_all = set.intersection(*({SnapshotName(*n) for n in json.loads(t)} for t in texts))
        token = hashlib.sha256(group.generation.token.encode()).hexdigest()
        number = group.generation.number + 1
        generation = replace(group.generation, token=token, number=number)
        start = max(of_all, key=lambda name: name.step)
        return Successor(group=Group.world(generation, run.context.group.rank), start=start)

    return decide


def train(case: Case, moments: Sequence[Sequence[Moment]], run: Path | None) -> dict[str, Tensor]:
    """Train; return the final state."""
    world = paceline.join(run, timeout=20)
    breaks = Breaks(world, [each[world.rank] for each in moments])
    world._next_generation = next_generation(world, breaks)
    model = network(norm=bool(case.arguments.get("sync_bn")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    paceline.parallelize(model, optimizer, world, **case.arguments)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    scaler = torch.amp.GradScaler("cpu", enabled=case.scaled, growth_interval=3)
    world.track(schedule, scaler)
    loader = paceline.loader(samples(), BATCH, world)
    for _ in range(EPOCHS):
        for x, y in loader:
            if case.freeze == world.steps:
                for p in model[0].parameters():
                    p.requires_grad_(False)
                    p.grad = None
            last = (loader.step + 1) % case.accumulate == 0 or loader.step + 1 == len(loader)
            if not last:
                with world.no_sync():
                    (scaler.scale(loss_of(model, x, y)) / case.accumulate).backward()
                    breaks.pass_by("accumulated")
                continue
            with world.step() as step:
                breaks.pass_by("begin")
                loss = loss_of(model, x, y) / case.accumulate
                breaks.pass_by("forward")
                scaler.scale(loss).backward()
                breaks.pass_by("backward")
                if case.scaled:
                    world.reduce()
                    scaler.unscale_(optimizer)
                    breaks.pass_by("unscaled")
                scaler.step(optimizer)
                scaler.update()
                breaks.pass_by("update")
                optimizer.zero_grad()
                breaks.pass_by("end")
            assert step.done == (world._loop.rollback.error is None)
            schedule.step()
    world.settle()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["rate"] = torch.tensor(schedule.get_last_lr())
    state["scale"] = torch.tensor(scaler.get_scale())
    if case.arguments.get("update") != "sharded":
        state |= momenta(model, optimizer)
    assert breaks.generation == len(moments), "a generation didn't end where it should have"
    assert world.generation == len(moments), "a generation has another number in the run"
    world.close()
    return state


def momenta(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return copies of the momenta, by parameter."""
    states = copy.deepcopy(dict(optimizer.state))
    return {
        f"momentum of {name}": own["momentum_buffer"]
        for (name, _), own in zip(model.named_parameters(), states.values(), strict=True)
    }


def drawn(case: Case, seed: int) -> list[list[Moment]]:
    """Draw moments around the run's and the epochs' first and last steps, and between them."""
    draw, each = random.Random(seed), case.accumulate
    last = (STEPS - 1) // each * each  # an epoch's last step begins there
    moments = []
    for epoch, first in ((0, 0), (0, last), (1, 0), (1, last), (2, each)):
        at = [name for name in case.at if first != last or name != "accumulated"]
        moments.append([(epoch * STEPS + first, draw.choice(at)) for _ in range(RANKS)])
    return moments


def main() -> None:
    """Train each case twice, and compare."""
    folder, *cases = sys.argv[1:]
    for number, name in enumerate(cases):
        case = CASES[name]
        plain = train(case, [], None)
        broken = train(case, drawn(case, number), Path(folder, name))
        unlike = [key for key in plain if not torch.equal(plain[key], broken[key])]
        print(f"{name}: {unlike or 'equal'}", flush=True)


if __name__ == "__main__":
    main()
