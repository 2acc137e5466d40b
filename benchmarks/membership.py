"""What the membership costs where nothing fails: its share of a step, added up from its parts.

    python benchmarks/membership.py [--quick] [--sync allreduce notified sharded] [--workers 2]

ResNet-20 with 64 images of 32 x 32 in a step, under `paceline launch`. The parts are

    acknowledge   in the training thread: acknowledgements and commits of snapshots, and the part
                  for the backup holder, which is handed over
    backup        of the thread that sends that part
    line          of the control line's thread: frames, reports of progress, judgments
    beats         of the thread that sends and receives heartbeats

All are processor time. The share is their sum divided by the time of the steps: an upper bound,
because only the first part is the training thread's. Each worker measures itself; a line of the
table is of the worker with the largest share.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from command_line import Options, run_script
from table import print_table
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

import paceline
from paceline.models.zoo import build_model
from paceline.snapshots.commits import SnapshotCommits

METHODS: dict[str, dict[str, Any]] = {
    "allreduce": {"sync": "allreduce"},
    "notified": {"sync": "notified"},
    "sharded": {"sync": "notified", "update": "sharded"},
}
THREADS = {"paceline-backup": "backup", "control line": "line", "control beats": "beats"}
CALLS = ("report", "receive", "commit_next", "wait")  # of the training thread
PARTS = ("acknowledge", *THREADS.values())
TITLES = ["sync", "steps", "step, ms", *(f"{part}, µs" for part in PARTS), "share, %"]
WIDTHS = [10, 8, 10, 18, 12, 12, 12, 10]
BATCH, SIZE, LABELS, WARM = 64, 32, 10, 60


def main() -> None:
    parser = Options(__doc__, quick="few steps", markdown=True)
    parser.add("--sync", choices=list(METHODS), default=list(METHODS), nargs="+")
    parser.add("--model", default="resnet20")
    parser.add("--steps", type=int, default=300)
    parser.add("--workers", type=int, default=2)
    options = parser.parse_args()
    steps = 40 if options.quick else options.steps
    lines = [TITLES, *(_measure(sync, steps, options) for sync in options.sync)]
    print_table(lines, WIDTHS, markdown=options.markdown)


def _measure(sync: str, steps: int, options: argparse.Namespace) -> list[str]:
    """Train with a method; return its line of the table, of the worker with the largest share."""
    with TemporaryDirectory() as folder:
        words = {"sync": sync, "steps": steps, "model": options.model, "folder": folder}
        command = [
            *(sys.executable, "-m", "paceline.cli.main", "launch", "-n", str(options.workers)),
            *("--", sys.executable, __file__, json.dumps(words)),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found = [json.loads(file.read_text()) for file in Path(folder).glob("*.json")]
    assert len(found) == options.workers, found
    worst = max(found, key=lambda one: sum(one[part] for part in PARTS) / one["seconds"])
    numbers = [f"{1e6 * worst[part] / steps:.0f}" for part in PARTS]
    share = sum(worst[part] for part in PARTS) / worst["seconds"]
    step = 1000 * worst["seconds"] / steps
    return [sync, str(steps), f"{step:.1f}", *numbers, f"{100 * share:.3f}"]


class OneEpoch(Dataset[tuple[Tensor, int]]):
    """Few images, again and again: no epoch ends, and so no checkpoint is written."""

    def __init__(self, samples: int) -> None:
        self._samples, self._images = samples, torch.randn(8 * BATCH, 3, SIZE, SIZE)

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._images[index % len(self._images)], index % LABELS


def work(sync: str, steps: int, model: str, folder: str) -> None:
    """Train as a worker; write to the folder what the parts took in the measured steps."""
    torch.set_num_threads(1)
    spent = {"acknowledge": 0.0}
    for name in CALLS:
        setattr(SnapshotCommits, name, _timed(getattr(SnapshotCommits, name), spent))
    data = OneEpoch(BATCH * (WARM + steps + 1))
    with paceline.join(Path(folder) / "run", checkpoint_minutes=0) as world:
        net = build_model(model, num_labels=LABELS, num_channels=3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        paceline.parallelize(net, optimizer, world, **METHODS[sync])
        loader = paceline.loader(data, BATCH, world)
        began, before = 0.0, {}
        while world.steps < WARM + steps:
            for x, y in loader:
                with world.step():
                    F.cross_entropy(net(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                if world.steps == WARM:
                    spent["acknowledge"], before, began = (
                        0.0,
                        _processor_seconds(),
                        time.monotonic(),
                    )
                elif world.steps == WARM + steps:
                    seconds, after = time.monotonic() - began, _processor_seconds()
                    parts = {name: after[name] - before.get(name, 0.0) for name in after}
                    found = {"seconds": seconds, **spent, **parts}
                    (Path(folder) / f"{world.rank}.json").write_text(json.dumps(found))
                    break


def _timed(method: Callable[..., Any], spent: dict[str, float]) -> Callable[..., Any]:
    """Return a method that adds the time of its calls to a sum."""

    @wraps(method)
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.thread_time()
        try:
            return method(*args, **kwargs)
        finally:
            spent["acknowledge"] += time.thread_time() - began

    return timed


def _processor_seconds() -> dict[str, float]:
    """Return the processor time of the membership's threads, by the kernel's account."""
    found = dict.fromkeys(THREADS.values(), 0.0)
    for thread in threading.enumerate():
        if thread.name in THREADS:
            account = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
            found[THREADS[thread.name]] += int(account.split()[0]) / 1e9
    return found


if __name__ == "__main__":
    run_script(main, lambda words: work(**words))
