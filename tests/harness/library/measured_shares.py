"""Loops of the library with `shares="measured"`, whose ranks load samples at unlike speeds.

The data set is what is slow, by a clock of its own: each sample takes time, on some ranks more.
Speeds are measured by that clock, so the machine's load changes nothing. The same loop in plain
torch trains whole batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

import paceline
from paceline import ConfigError
from paceline.comm.communicator import Communicator
from paceline.data.order import Order
from paceline.recorder import NullRecorder
from tests.harness.library.small_training import SEED, copied, loss_of, network, place, samples, sgd

BATCH, SAMPLES, EPOCHS = 32, 32 * 12 + 20, 3  # of an epoch's 13 steps the last one is short
TESTED = 50  # samples of an evaluation, in two batches
SLOW = 4.0  # times as slow as the others


class Slow(Dataset[Any]):
    """Samples that take 0.3 ms each, on a slow rank more.

    Attributes:
        clock: the seconds that all samples so far took.
    """

    def __init__(self, *, slow: bool, count: int = SAMPLES) -> None:
        self._samples, self._seconds = samples(count), 3e-4 * (SLOW if slow else 1)
        self.clock = 0.0

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.clock += self._seconds
        x, y = self._samples[index]
        return x, y


class Cuts(NullRecorder):
    """Keeps the number of each rank's samples in each step."""

    def __init__(self) -> None:
        self.counts: list[tuple[int, ...]] = []

    def event(self, name: str, **fields: Any) -> None:
        if name == "step":
            self.counts.append(tuple(b - a for a, b in pairwise(fields["cuts"])))


Loop = Callable[[paceline.World | None, nn.Module, Optimizer, Any], None]


def usual(
    world: paceline.World | None, model: nn.Module, optimizer: Optimizer, batches: Any
) -> None:
    for x, y in batches:
        if world is None:
            _update(model, optimizer, x, y)
        else:
            with world.step():
                _update(model, optimizer, x, y)


def clipped(
    world: paceline.World | None, model: nn.Module, optimizer: Optimizer, batches: Any
) -> None:
    """Clip by the global norm, which needs the mean over all ranks."""

    def update(x: Tensor, y: Tensor) -> None:
        loss_of(model, x, y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()

    for x, y in batches:
        if world is None:
            update(x, y)
        else:
            with world.step():
                update(x, y)


def accumulated(
    world: paceline.World | None, model: nn.Module, optimizer: Optimizer, batches: Any
) -> None:
    """A step over three batches of the loader each time."""
    for number, (x, y) in enumerate(batches):
        if world is None:
            (loss_of(model, x, y) / 3).backward()
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        elif number % 3 < 2:
            with world.no_sync():
                (loss_of(model, x, y) / 3).backward()
        else:
            with world.step():
                (loss_of(model, x, y) / 3).backward()
                optimizer.step()
                optimizer.zero_grad()


def _update(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    loss_of(model, x, y).backward()
    optimizer.step()
    optimizer.zero_grad()


class Case:
    """A loop, and how its gradients are exchanged and its data loaded."""

    def __init__(self, loop: Loop = usual, *, norm: bool = False, **options: Any) -> None:
        self.loop, self.norm = loop, norm
        self.count = options.pop("samples", SAMPLES)
        self.options = options

    def alone(self) -> Mapping[str, Tensor]:
        """Train by plain torch; return the model's state."""
        model = network(norm=self.norm)
        optimizer = sgd(model)
        order = Order(size=self.count, batch_size=BATCH, seed=SEED)
        for epoch in range(EPOCHS):
            indices = order.epoch_indices(epoch)
            cuts = range(0, self.count, BATCH)
            whole = [samples(self.count)[indices[at : at + BATCH]] for at in cuts]
            self.loop(None, model, optimizer, whole)
        return model.state_dict()

    def by_library(
        self, run: Path | None = None, epochs: int = EPOCHS, slow: int | None = 0
    ) -> tuple[Mapping[str, Tensor], list[tuple[int, ...]], list[Tensor]]:
        """Train by the library.

        Returns:
            the model's state, the ranks' counts in each step, and this rank's inputs of each batch
            of an evaluation at the end.
        """
        with paceline.join(run, seed=SEED) as world:
            model = network(norm=self.norm)
            optimizer = sgd(model)
            cuts = Cuts()
            if run is None:
                world._run.recorder = cuts
            paceline.parallelize(
                model, optimizer, world, shares="measured", sync_bn=self.norm, **self.options
            )
            data = Slow(slow=world.rank == slow, count=self.count)
            _measure_by(data, world)
            loader = paceline.loader(data, BATCH, world)
            for _ in range(loader.epoch, epochs):
                self.loop(world, model, optimizer, loader)
            test = paceline.loader(samples(TESTED), BATCH, world, train=False)
            return copied(model), cuts.counts, [x for x, _ in test]


def _measure_by(data: Slow, world: paceline.World) -> None:
    """Measure this rank's speed by the data set's clock, which stands still in waits."""
    assert world._session.speeds is not None
    world._run.timeline.own_seconds = lambda: data.clock  # type: ignore[method-assign]


CASES: dict[str, Case] = {
    "allreduce": Case(sync="allreduce"),
    "notified": Case(sync="notified"),
    "sharded": Case(sync="notified", update="sharded"),
    "auto": Case(),
    "clipped": Case(clipped, sync="notified"),
    "sync_bn": Case(sync="allreduce", norm=True),
    "accumulated": Case(accumulated, sync="allreduce", samples=BATCH * 12),
}


def train_all(communicator: Communicator, ports: list[int]) -> dict[str, Any]:
    """Train all cases as a rank of `spawn`, a world each."""
    results = {}
    for name, port in zip(CASES, ports, strict=True):
        place(communicator, port)
        results[name] = CASES[name].by_library()
    return results


def train_twice(communicator: Communicator, ports: list[int], run: Path) -> None:
    """Train an epoch, and the others in a second start of the run."""
    for epochs, port in zip((1, EPOCHS), ports, strict=True):
        place(communicator, port)
        CASES["allreduce"].by_library(run, epochs)


def mistakes(communicator: Communicator, ports: list[int]) -> dict[str, str]:
    """Make a mistake a world; return the sentences."""
    found = {}
    for (name, mistake), port in zip(MISTAKES.items(), ports, strict=True):
        place(communicator, port)
        try:
            with paceline.join(seed=SEED) as world:
                mistake(world)
        except ConfigError as error:
            found[name] = str(error)
    return found


def _bound(world: paceline.World, shares: str = "measured") -> tuple[nn.Module, Optimizer]:
    model = network()
    return paceline.parallelize(model, sgd(model), world, sync="allreduce", shares=shares)


def _counts_itself(world: paceline.World) -> None:
    _bound(world)
    paceline.loader(samples(), BATCH, world)
    with world.step(samples=3):
        pass


def _has_no_loader(world: paceline.World) -> None:
    _bound(world)
    with world.step():
        pass


def _accumulates_a_short_batch(world: paceline.World) -> None:
    """The batches of a step have 32 and 5 samples, of which rank 0 trains 25 and 4."""
    world._position.position.shares.append((0, [25, 7]))
    model, optimizer = _bound(world)
    loader = paceline.loader(samples(BATCH + 5), BATCH, world)
    for x, y in loader:
        if loader.step == 0:
            with world.no_sync():
                loss_of(model, x, y).backward()
        else:
            with world.step():
                _update(model, optimizer, x, y)


def _differs_between_models(world: paceline.World) -> None:
    _bound(world)
    _bound(world, "equal")


MISTAKES: dict[str, Callable[[paceline.World], None]] = {
    "counts itself": _counts_itself,
    "no loader": _has_no_loader,
    "a short batch": _accumulates_a_short_batch,
    "models": _differs_between_models,
}
