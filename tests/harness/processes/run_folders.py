"""Reads a run's event files, while the run is active and after its end."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NET = '''
import json
import os
import time
from contextlib import suppress
from pathlib import Path

from torch import nn


class Net(nn.Module):
    """A net in float64 without batch statistics, which takes long while `hold` says so."""

    def __init__(self, num_labels, dropout):
        super().__init__()
        self.trained = 0
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Dropout(dropout),
            nn.Linear(4 * 15 * 15, num_labels),
        ).double()

    def forward(self, images):
        self.hold()
        return self.body(images.double())

    def hold(self):
        self.trained += self.training
        held = Path(__file__).with_name("held")
        with suppress(FileNotFoundError):
            passes, seconds = map(float, held.read_text().split())
            end = time.monotonic() + seconds
            while self.training and self.trained > passes and time.monotonic() < end:
                os.stat(held)
                time.sleep(0.01)


def plain(num_labels):
    return Net(num_labels, 0.0)


def dropout(num_labels):
    return Net(num_labels, 0.5)


class Single(Net):
    """The same in float32."""

    def forward(self, images):
        self.hold()
        return self.body(images)


def single(num_labels):
    return Single(num_labels, 0.5).float()


class Slow(Net):
    """A net that a local rank computes more slowly: "1 3" in the file `slow` means thrice."""

    def __init__(self, num_labels):
        super().__init__(num_labels, 0.0)
        self.rank = json.loads(os.environ["PACELINE_WORKER"])["local_rank"]

    def forward(self, images):
        rank, factor = Path(__file__).with_name("slow").read_text().split()
        time.sleep(len(images) * 0.001 * (float(factor) if int(rank) == self.rank else 1))
        return super().forward(images)


def slow(num_labels):
    return Slow(num_labels)


class Turns(Slow):
    """A net that each of two local ranks computes slowly for two passes, then the other one."""

    def forward(self, images):
        self.passes = getattr(self, "passes", 0) + 1
        time.sleep(0.08 if self.passes // 2 % 2 == self.rank else 0.015)
        return Net.forward(self, images)


def turns(num_labels):
    return Turns(num_labels)
'''


def write_net(folder: Path) -> None:
    """Write a user's model into a folder."""
    (folder / "net.py").write_text(NET)


def hold(folder: Path, passes: int, seconds: float = 1000.0) -> None:
    """Let each training pass of the model take long, in each process after so many of them.

    A run whose processes are killed or stopped meanwhile hasn't ended before, however long the
    test's process doesn't run.

    Args:
        folder: that of the model.
        seconds: how long, unless `release` ends it.
    """
    (folder / "held").write_text(f"{passes} {seconds}")


def release(folder: Path) -> None:
    """Let no pass take long any more."""
    (folder / "held").unlink()


def events(run: Path, rank: int = 0) -> list[dict[str, Any]]:
    """Read a rank's complete lines over all starts; none before its first start."""
    return [event for path in event_files(run, rank) for event in complete_lines(path)]


def event_files(run: Path, rank: int = 0) -> list[Path]:
    """Return the files of the members that had a rank, in the order of their starts."""
    found = []
    for path in run.glob("events.*.jsonl"):
        start = next((event for event in complete_lines(path) if event["event"] == "run"), None)
        if start and start["rank"] == rank:
            found.append((start["generation"], path))
    return [path for _, path in sorted(found)]


def complete_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read a file's complete lines."""
    lines = path.read_text().splitlines(keepends=True)
    return (json.loads(line) for line in lines if line.endswith("\n"))


def losses(run: Path) -> dict[int, list[float]]:
    """Read all losses logged for each step, over all starts of the run."""
    found: dict[int, list[float]] = {}
    for event in events(run):
        if event["event"] == "loss":
            found.setdefault(event["step"], []).append(event["loss"])
    return found


def wait_until(condition: Callable[[], bool], limit: float = 60.0) -> None:
    """Return once the condition is true; fail after `limit` seconds."""
    deadline, pause = time.monotonic() + limit, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"condition not reached within {limit:g} s"
        pause.wait(0.02)


def wait_until_step(run: Path, step: int, generation: int, limit: float = 60.0) -> None:
    """Wait until rank 0 has ended a step in a start of the run."""
    wait_until(
        lambda: any(
            event["event"] == "step" and event["step"] >= step and event["generation"] == generation
            for event in events(run)
        ),
        limit,
    )
