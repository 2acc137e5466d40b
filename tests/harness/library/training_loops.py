"""Training loops as people write them, each by the library and by plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

import paceline
from paceline.comm.communicator import Communicator
from tests.harness.library.small_training import (
    BATCH,
    SEED,
    Case,
    copied,
    loss_of,
    network,
    place,
    plain_step,
    samples,
    sgd,
    whole_batches,
)


def micro_batches(model: nn.Module, x: Tensor, y: Tensor, optimizer: Optimizer, world: Any) -> None:
    """Two backwards a step; the halves' losses are weighed by their sizes."""
    half = len(x) // 2
    if half:
        first = loss_of(model, x[:half], y[:half]) * half / len(x)
        if world is None:
            first.backward()
        else:
            with world.no_sync():
                first.backward()
    (loss_of(model, x[half:], y[half:]) * (len(x) - half) / len(x)).backward()
    optimizer.step()
    optimizer.zero_grad()


def clipped(model: nn.Module, x: Tensor, y: Tensor, optimizer: Optimizer, world: Any) -> None:
    """Clipping by the norm of the global gradient."""
    loss_of(model, x, y).backward()
    if world is not None:
        world.reduce()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


def scaled(model: nn.Module, x: Tensor, y: Tensor, optimizer: Optimizer, world: Any) -> None:
    """A loss scale of one's own, taken out again."""
    (loss_of(model, x, y) * 1024).backward()
    if world is not None:
        world.reduce()
    for p in model.parameters():
        assert p.grad is not None
        p.grad.div_(1024)
    optimizer.step()
    optimizer.zero_grad()


def groups(model: nn.Module) -> Optimizer:
    """Two parameter groups."""
    first, *_, last = model.children()
    return torch.optim.AdamW(
        [{"params": first.parameters(), "lr": 1e-2}, {"params": last.parameters()}], lr=1e-3
    )


CASES = {
    "SGD and StepLR": Case(make_schedule=lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5)),
    "AdamW in groups and OneCycleLR": Case(
        make_optimizer=groups,
        make_schedule=lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=15),
        schedule_in="step",
    ),
    "RMSprop and warm restarts": Case(
        make_optimizer=lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-2),
        make_schedule=lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
        schedule_in="step",
    ),
    "Adafactor and a sequence of schedulers": Case(
        make_optimizer=lambda m: torch.optim.Adafactor(m.parameters(), lr=1e-2),
        make_schedule=lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
        ),
    ),
    "no_sync": Case(train_step=micro_batches),
    "reduce and clip": Case(train_step=clipped),
    "reduce and unscale": Case(train_step=scaled),
    "sync_bn": Case(norm=True),
}


def train_all(communicator: Communicator, ports: list[int]) -> dict[str, dict[str, Tensor]]:
    """Train every case as a rank of `spawn`, a world each; return the models' states."""
    results = {}
    for name, port in zip(CASES, ports, strict=True):
        place(communicator, port)
        results[name] = CASES[name].by_library()
    return results


LOOPS = ("accumulated", "counted", "uncounted", "averaged", "warm")


def run_loops(communicator: Communicator, ports: list[int]) -> dict[str, Any]:
    """Run loops that are more than a step as a rank of `spawn`, a world each."""
    results = {}
    for name, port in zip(LOOPS, ports, strict=True):
        place(communicator, port)
        with paceline.join(seed=SEED) as world:
            model = network()
            results[name] = globals()[name](world, model, sgd(model))
    return results


def accumulated(world: paceline.World, model: nn.Module, optimizer: Optimizer) -> Any:
    """A step over two batches of the loader each time."""
    paceline.parallelize(model, optimizer, world)
    loader = paceline.loader(samples(48), BATCH, world)
    for _ in range(2):
        for x, y in loader:
            if loader.step % 2 == 0:
                with world.no_sync():
                    (loss_of(model, x, y) / 2).backward()
                continue
            with world.step():
                (loss_of(model, x, y) / 2).backward()
                optimizer.step()
                optimizer.zero_grad()
    return copied(model)


def accumulated_alone() -> dict[str, Tensor]:
    """The same in plain torch."""
    model = network()
    optimizer = sgd(model)
    for epoch in range(2):
        for number, (x, y) in enumerate(whole_batches(samples(48), epoch)):
            (loss_of(model, x, y) / 2).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    return model.state_dict()


def counted(world: paceline.World, model: nn.Module, optimizer: Optimizer) -> Any:
    """Batches of one's own: the last rank has 3 samples or fewer, rank 0 the rest, others none."""
    paceline.parallelize(model, optimizer, world)
    for x, y in whole_batches(samples(), 0):
        cuts = [*[0] * (world.world_size - 1), min(3, len(x))][-world.world_size :]
        cuts[0] = len(x) - sum(cuts[1:])
        first = sum(cuts[: world.rank])
        mine = slice(first, first + cuts[world.rank])
        with world.step(samples=cuts[world.rank]):
            if cuts[world.rank]:
                loss_of(model, x[mine], y[mine]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return copied(model)


def uncounted(world: paceline.World, model: nn.Module, optimizer: Optimizer) -> Any:
    """Batches of one's own, of the same size on all ranks."""
    paceline.parallelize(model, optimizer, world)
    x, y = samples(12)[:]
    each = 12 // world.world_size
    mine = slice(world.rank * each, (world.rank + 1) * each)
    for _ in range(4):
        with world.step():
            loss_of(model, x[mine], y[mine]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return copied(model)


def averaged(world: paceline.World, model: nn.Module, optimizer: Optimizer) -> Any:
    """An average of weights beside, after `settle`, and an evaluation of it."""
    paceline.parallelize(model, optimizer, world)
    average = torch.optim.swa_utils.AveragedModel(model)
    loader = paceline.loader(samples(), BATCH, world)
    test = paceline.loader(samples(25), BATCH, world, train=False)
    for x, y in loader:
        with world.step():
            loss_of(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        world.settle()
        average.update_parameters(model)
    sums = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for x, y in test:
            sums += torch.stack([loss_of(average, x, y) * len(x), torch.tensor(float(len(x)))])
    loss, seen = world.total(sums).tolist()
    return copied(average.module), loss / seen, seen


def warm(world: paceline.World, model: nn.Module, optimizer: Optimizer) -> Any:
    """Rank 0 comes with momenta; the others get them."""
    if world.rank == 0:
        plain_step(model, *samples(7)[:], optimizer, None)
    paceline.parallelize(model, optimizer, world)
    for x, y in paceline.loader(samples(), BATCH, world):
        with world.step():
            plain_step(model, x, y, optimizer, world)
    return copied(model)
