"""What trackers wrote, read back by their own libraries, and a script whose run they show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import paceline
from paceline.observe.trackers.tracker import Point
from tests.harness.library.small_training import BATCH, loss_of, network, samples, sgd

EPOCHS, STEPS = 3, 5  # of 50 samples
Curves = dict[str, dict[int, float]]  # name -> step -> value


class MemoryWriter:
    """Writer that keeps all in memory."""

    place = "memory"

    def __init__(self) -> None:
        self.points: list[tuple[int, dict[str, float]]] = []
        self.notes: list[tuple[int, str]] = []
        self.restored: list[int] = []
        self.complete: bool | None = None

    def write(self, points: Sequence[Point]) -> None:
        self.points += [(point.step, dict(point.values)) for point in points]

    def note(self, text: str, step: int) -> None:
        self.notes.append((step, text))

    def go_back(self, step: int) -> None:
        self.restored.append(step)

    def close(self, *, complete: bool) -> None:
        self.complete = complete


def tensorboard_of(run: Path) -> EventAccumulator:
    """Read the event files of a run's folder, as TensorBoard does."""
    accumulator = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    return accumulator


def curves(accumulator: EventAccumulator) -> Curves:
    """Return all scalars; each step has one value."""
    found: Curves = {}
    for tag in accumulator.Tags()["scalars"]:
        events = accumulator.Scalars(tag)
        found[tag] = {event.step: event.value for event in events}
        assert len(found[tag]) == len(events), f"{tag}: a step has two values"
    return found


class Killed(Exception):
    """The script ended here."""


def train(run: Path, tracker: str, die_before: int | None = None, **options: Any) -> Curves:
    """Train in a script that logs its own loss; return what it logged."""
    logged: Curves = {"loss": {}}
    with paceline.join(run, tracker=tracker, **options) as world:
        model = network()
        optimizer = sgd(model)
        paceline.parallelize(model, optimizer, world)
        loader = paceline.loader(samples(), BATCH, world)
        for _ in range(loader.epoch, EPOCHS):
            for x, y in loader:
                if world.steps == die_before:
                    raise Killed
                with world.step():
                    loss = loss_of(model, x, y)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                world.log(loss=loss)
                logged["loss"][world.steps - 1] = loss.item()
    return logged
