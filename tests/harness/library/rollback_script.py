"""A script whose generations end in mid-step, in all ranks at moments of their own.

    python -m tests.harness.library.rollback_script RANKS FOLDER CASE …

It trains each case without and with such ends. With two ranks all are in each generation, and it
prints the case with "equal" where all bits of weights, optimizer and loss scale are. With three the
second one isn't in generations of odd number, and it prints the case with "close" and a digest
where all values are, to 1e-10. Averaging is compared with a training whose generations end where
their snapshots were taken, so that nothing is repeated; and without a server, if it has one.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import paceline
from paceline.api.world import World
from paceline.config.world import SyncConfig
from paceline.errors import CommError
from paceline.replica.replica import Replica
from paceline.state.exchange_choice import read_choice
from tests.harness.library.small_training import BATCH, loss_of, network, samples
from tests.harness.library.successors import Successors

EPOCHS, STEPS = 3, 5
Moment = tuple[int, str]


@dataclass(frozen=True)
class Case:
    """A way to train.

    Attributes:
        arguments: of `paceline.parallelize`.
        accumulate: batches a step.
        scaled: whether a loss scaler is used.
        words: whether the first layer is a table with row-sparse gradients.
        freeze: the step before which the first layer is frozen; -1: none.
        at: the moments at which a generation may end.
        epochs: how many.
        ends: the steps in which generations end; by default around the ends of epochs.
    """

    arguments: dict[str, Any]
    accumulate: int = 1
    scaled: bool = False
    words: bool = False
    freeze: int = -1
    at: tuple[str, ...] = ("begin", "forward", "backward", "update", "end")
    epochs: int = EPOCHS
    ends: tuple[int, ...] = ()


NOTIFIED = {"sync": "notified", "bucket_mb": 1e-4}
CASES = {
    "allreduce": Case({"sync": "allreduce"}),
    "notified": Case(NOTIFIED),
    "sharded": Case({**NOTIFIED, "update": "sharded"}),
    "sync_bn": Case({**NOTIFIED, "sync_bn": True}),
    "accumulation": Case(NOTIFIED, accumulate=2, at=("begin", "accumulated", "backward", "end")),
    "loss scaling": Case(NOTIFIED, scaled=True, at=("backward", "unscaled", "update")),
    "frozen layers": Case(NOTIFIED, freeze=6),
    "sparse rows": Case(NOTIFIED, words=True),
    "frozen table": Case({"sync": "allreduce"}, words=True, freeze=6),
    "auto": Case({"sync": "auto"}),
}
AVERAGES = {
    "average": Case({"sync": "average:every=2,outer=diloco"}),
    "delayed": Case({"sync": "average:every=4,delay=1,momenta=average"}),
}
SERVED = Case({"sync": "average:every=2,outer=diloco,through=server"})
# Trials begin in step 100, and take 24 steps. They begin anew in each further generation until the
# choice is made; another 24 steps fit behind the last end.
TRIALS = Case({"sync": "auto"}, epochs=36, ends=(50, 104, 118, 148))


def parked(generation: int) -> tuple[int, ...]:
    """Return the members of three that aren't in a generation."""
    return (1,) if generation % 2 else ()


class Breaks:
    """The moments at which this member's generations end, one each."""

    def __init__(self, world: World, generations: Successors, moments: Sequence[Moment]) -> None:
        self._world, self._generations, self._moments = world, generations, moments

    def pass_by(self, name: str) -> None:
        """End the generation, if this is its moment."""
        moment = dict(enumerate(self._moments)).get(self._generations.generation)
        if moment == (self._world.steps, name):
            raise CommError(f"broken off: {name}")


def train(case: Case, moments: Sequence[Sequence[Moment]], run: Path | None) -> dict[str, Tensor]:
    """Train; return the final state."""
    world = paceline.join(run, timeout=20)
    generations = Successors(world, *([parked] if world.world_size > 2 else []))
    breaks = Breaks(world, generations, [each[world.rank] for each in moments])
    model = network(norm=bool(case.arguments.get("sync_bn")), words=case.words)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    paceline.parallelize(model, optimizer, world, **case.arguments)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    scaler = torch.amp.GradScaler("cpu", enabled=case.scaled, growth_interval=3)
    world.track(schedule, scaler)
    loader = paceline.loader(samples(), BATCH, world)
    while loader.epoch < case.epochs:  # a member that comes back may have missed some
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
    world.merge()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["rate"] = torch.tensor(schedule.get_last_lr())
    state["scale"] = torch.tensor(scaler.get_scale())
    if case.arguments.get("update") != "sharded":
        state |= momenta(model, optimizer)
    if run is not None and case.ends:
        check_choice(world, run)
    state["starts"] = torch.tensor(generations.starts)
    assert generations.generation == len(moments), "a generation didn't end where it should have"
    assert world.generation == len(moments), "a generation has another number in the run"
    world.close()
    return state


def check_choice(world: World, run: Path) -> None:
    """Require that the run uses the exchange that its trials have chosen."""
    choice = read_choice(run)
    assert choice is not None, "no exchange was chosen"
    assert isinstance(world._loop.replica, Replica)
    chosen = SyncConfig(sync=choice.sync, bucket_mb=choice.bucket_mb)
    assert world._loop.replica._binder._plan.bucket_bytes == chosen.bucket_bytes


def momenta(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return copies of the momenta, by parameter."""
    states = optimizer.state
    return {
        f"momentum of {name}": states[p]["momentum_buffer"].to_dense().clone()
        for name, p in model.named_parameters()
    }


def drawn(case: Case, seed: int, ranks: int) -> list[list[Moment]]:
    """Draw moments around the run's and the epochs' first and last steps, and between them."""
    draw, each = random.Random(seed), case.accumulate
    last = (STEPS - 1) // each * each  # an epoch's last step begins there
    ends = case.ends or (0, last, STEPS, STEPS + last, 2 * STEPS + each)
    moments = []
    for step in ends:
        at = [name for name in case.at if step % STEPS != last or name != "accumulated"]
        moments.append([(step, draw.choice(at)) for _ in range(ranks)])
    return moments[: len(moments) // 2 * 2] if ranks > 2 else moments  # all are in the last one


def main() -> None:
    """Train each case twice, and compare."""
    ranks, folder, *names = sys.argv[1:]
    for number, name in enumerate(names):
        case = TRIALS if name == "trials" else {**CASES, **AVERAGES, "served": SERVED}[name]
        broken = train(case, drawn(case, number, int(ranks)), Path(folder, name))
        starts: list[int] = broken.pop("starts").tolist()
        replayed = ranks == "3" and "average" in str(case.arguments["sync"])
        moments = [[(start, "begin")] * 3 for start in starts] if replayed else []
        plain = train(AVERAGES["average"] if case is SERVED else case, moments, None)
        assert plain.pop("starts").tolist() == (starts if replayed else [])
        alike = torch.equal if ranks == "2" or replayed else close
        unlike = [key for key in plain if not alike(plain[key], broken[key])]
        common = {key: value for key, value in broken.items() if "momentum" not in key}
        of_all = common if "average" in str(case.arguments["sync"]) else broken
        answer = "equal" if ranks == "2" else f"close {digest(of_all)}"
        print(f"{name}: {unlike or answer}", flush=True)


def close(one: Tensor, other: Tensor) -> bool:
    """Return whether values are equal but for the order of sums."""
    return bool((one.double() - other.double()).abs().max() < 1e-10)


def digest(state: dict[str, Tensor]) -> str:
    """Return a digest of all bits of a state."""
    data = b"".join(value.numpy().tobytes() for value in state.values())
    return hashlib.sha256(data).hexdigest()


if __name__ == "__main__":
    main()
