"""Reads a run's event files, while the run is active and after its end."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NET = '''
from torch import nn


class Net(nn.Module):
    """A net in float64 without batch statistics."""

    def __init__(self, num_labels, dropout):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Dropout(dropout),
            nn.Linear(4 * 15 * 15, num_labels),
        ).double()

    def forward(self, images):
        return self.body(images.double())


def plain(num_labels):
    return Net(num_labels, 0.0)


def dropout(num_labels):
    return Net(num_labels, 0.5)


class Single(Net):
    """The same in float32."""

    def forward(self, images):
        return self.body(images)


def single(num_labels):
    return Single(num_labels, 0.5).float()
'''


def write_net(folder: Path) -> None:
    """Put somebody's own model into the folder where they stand."""
    (folder / "net.py").write_text(NET)


def events(run: Path, rank: int = 0) -> list[dict[str, Any]]:
    """Read a rank's whole lines; none while the file isn't there."""
    path = run / f"events.rank{rank}.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def losses(run: Path) -> dict[int, list[float]]:
    """Every loss that was told of each step, over all starts of the run."""
    found: dict[int, list[float]] = {}
    for event in events(run):
        if event["event"] == "loss":
            found.setdefault(event["step"], []).append(event["loss"])
    return found


def until(condition: Callable[[], bool], limit: float = 60.0) -> None:
    """Look until it is so."""
    deadline, pause = time.monotonic() + limit, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it didn't come to that"
        pause.wait(0.005)


def until_step(run: Path, step: int, generation: int) -> None:
    """Wait until rank 0 has ended a step in a start of the run."""
    until(
        lambda: any(
            event["event"] == "step" and event["step"] >= step and event["generation"] == generation
            for event in events(run)
        )
    )
