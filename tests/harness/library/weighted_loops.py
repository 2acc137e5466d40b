"""Loops whose losses are means over tokens, class weights or pixels, by library and plain torch.

Each global batch is divided unevenly. Where there are several ranks, the last one's labels are all
ignored in every second step, so that its loss is NaN and its weight 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline.comm.communicator import Communicator
from tests.harness.library.small_training import BATCH, SEED, copied, network, place, sgd
from tests.harness.library.small_training import whole_batches as batches

IGNORED = -100
CLASSES = torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64)
METHODS: dict[str, dict[str, str]] = {
    "allreduce": {"sync": "allreduce"},
    "notified": {"sync": "notified"},
    "sharded": {"sync": "notified", "update": "sharded"},
}


def tokens(count: int = 48) -> TensorDataset:
    """Make up sequences of 5 tokens with 6 values each, of which the last ones are padding."""
    random = torch.Generator().manual_seed(2)
    x = torch.randn(count, 5, 6, dtype=torch.float64, generator=random)
    y = torch.randint(0, 3, (count, 5), generator=random)
    lengths = torch.randint(1, 6, (count, 1), generator=random)
    y[torch.arange(5) >= lengths] = IGNORED
    return TensorDataset(x, y)


def token_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean over the tokens that aren't padding."""
    return F.cross_entropy(model(x.flatten(0, 1)), y.flatten(), ignore_index=IGNORED)


def class_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean by class weights."""
    logits = model(x.flatten(0, 1))
    return F.cross_entropy(logits, y.flatten(), weight=CLASSES, ignore_index=IGNORED)


def pixel_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean of squares over a mask."""
    mask = (y != IGNORED).flatten()
    errors = model(x.flatten(0, 1)).square().sum(1)
    return (errors * mask).sum() / mask.sum()


LOSSES: dict[str, Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    "tokens": token_loss,
    "classes": class_loss,
    "pixels": pixel_loss,
}


def weight_of(kind: str, y: Tensor) -> float:
    """Return what a loss is a mean over."""
    kept = y[y != IGNORED]
    return float(CLASSES[kept].sum()) if kind == "classes" else len(kept)


def divided(world_size: int, count: int) -> list[int]:
    """Return at which samples the uneven slices of a batch begin and end."""
    return [
        count * rank * (rank + 1) // (world_size * (world_size + 1))
        for rank in range(world_size + 1)
    ]


def hidden(world_size: int, number: int, y: Tensor) -> Tensor:
    """Return a batch's labels, of which the last rank's are ignored in every second step."""
    y = y.clone()
    if world_size > 1 and number % 2:
        y[divided(world_size, len(y))[-2] :] = IGNORED
    return y


def own_batches(world: paceline.World, kind: str, *, norm: bool, **options: Any) -> Any:
    """Train batches of one's own."""
    model = network(norm=norm)
    optimizer = sgd(model)
    paceline.parallelize(model, optimizer, world, bucket_mb=1e-3, sync_bn=norm, **options)
    for number, (x, y) in enumerate(batches(tokens(), 0)):
        cuts = divided(world.world_size, len(x))
        mine = slice(cuts[world.rank], cuts[world.rank + 1])
        hidden_y = hidden(world.world_size, number, y)
        with world.step(weight=weight_of(kind, hidden_y[mine]), samples=len(x[mine])):
            LOSSES[kind](model, x[mine], hidden_y[mine]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return copied(model)


def alone(world_size: int, kind: str, *, norm: bool) -> dict[str, Tensor]:
    """Do the same in plain torch, on whole batches."""
    model = network(norm=norm)
    optimizer = sgd(model)
    for number, (x, y) in enumerate(batches(tokens(), 0)):
        y = hidden(world_size, number, y)
        if norm and world_size > 1 and number % 2:  # a rank with weight 0 has no statistics either
            rest = divided(world_size, len(y))[-2]
            x, y = x[:rest], y[:rest]
        LOSSES[kind](model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return copied(model)


def accumulated(world: paceline.World, kind: str, **options: Any) -> Any:
    """Train two batches of the loader in each step, by a weight that is their sum."""
    model = network()
    optimizer = sgd(model)
    paceline.parallelize(model, optimizer, world, **options)
    held: list[tuple[Tensor, Tensor]] = []
    for x, y in paceline.loader(tokens(), BATCH, world):
        held.append((x, y))
        if len(held) < 2:
            continue
        weights = [weight_of(kind, labels) for _, labels in held]
        with world.step(weight=sum(weights)):
            with world.no_sync():
                (LOSSES[kind](model, *held[0]) * weights[0] / sum(weights)).backward()
            (LOSSES[kind](model, *held[1]) * weights[1] / sum(weights)).backward()
            optimizer.step()
            optimizer.zero_grad()
        held.clear()
    return copied(model)


def accumulated_alone() -> dict[str, Tensor]:
    """Do the same in plain torch, on pairs of whole batches."""
    model = network()
    optimizer = sgd(model)
    held: list[tuple[Tensor, Tensor]] = []
    for x, y in batches(tokens(), 0):
        held.append((x, y))
        if len(held) == 2:
            token_loss(model, *map(torch.cat, zip(*held, strict=True))).backward()
            optimizer.step()
            optimizer.zero_grad()
            held.clear()
    return copied(model)


def averaged(world: paceline.World) -> Any:
    """Merge after each step, in which the last rank's loss is NaN every second time."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    paceline.parallelize(model, optimizer, world, sync=paceline.Average(every=1))
    for number, (x, y) in enumerate(batches(tokens(), 0)):
        cuts = divided(world.world_size, len(x))
        mine = slice(cuts[world.rank], cuts[world.rank + 1])
        hidden_y = hidden(world.world_size, number, y)
        with world.step(weight=weight_of("tokens", hidden_y[mine])):
            token_loss(model, x[mine], hidden_y[mine]).backward()
            optimizer.step()
            optimizer.zero_grad()
    world.merge()
    return copied(model)


def averaged_alone(world_size: int) -> dict[str, Tensor]:
    """Do the same in plain torch: with SGD, the mean of the updates is the update by the mean."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (x, y) in enumerate(batches(tokens(), 0)):
        token_loss(model, x, hidden(world_size, number, y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return copied(model)


def cases(world_size: int) -> list[tuple[str, str, str]]:
    """List what a world of some ranks trains: loop, loss, method."""
    methods = list(METHODS)
    found = [("own", kind, method) for kind in LOSSES for method in methods]
    found += [("norm", "tokens", "allreduce"), ("norm", "pixels", "notified")]
    found += [("accumulated", "tokens", method) for method in methods]
    return [*found, ("averaged", "tokens", "")]


def run_weighted(communicator: Communicator, ports: list[int]) -> list[dict[str, Tensor]]:
    """Train all cases as a rank of `spawn`, a world each."""
    results = []
    for (loop, kind, method), port in zip(cases(communicator.world_size), ports, strict=True):
        place(communicator, port)
        with paceline.join(seed=SEED) as world:
            if loop == "accumulated":
                results.append(accumulated(world, kind, **METHODS[method]))
            elif loop == "averaged":
                results.append(averaged(world))
            else:
                norm = loop == "norm"
                results.append(own_batches(world, kind, norm=norm, **METHODS[method]))
    return results


def expected(world_size: int, loop: str, kind: str) -> dict[str, Tensor]:
    """Return what plain torch makes of a case."""
    if loop == "accumulated":
        return accumulated_alone()
    if loop == "averaged":
        return averaged_alone(world_size)
    return alone(world_size, kind, norm=loop == "norm")
