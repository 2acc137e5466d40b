"""What in-memory snapshots cost: the time of their copies, as a share of a step.

    python benchmarks/snapshots.py [--quick] [--sync notified] [--model resnet20]

ResNet-20 on 2 ranks over loopback. A snapshot is copied part by part while the step runs, and
nothing is settled for it. So its cost is the sum of its spans. Every rank takes a snapshot in each
step, and each is committed at once, so that the copies go to memory that is used again. The share
is of the same step without these spans.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

import torch
from checkpoint import timed
from links import LOOPBACK, connect
from place import meet
from ranks import start
from rounds import median_of
from variants import Setting, Training, bind

from paceline.cluster.supervision.allocator import keep_freed_memory
from paceline.config.world import SyncConfig
from paceline.recorder import NullRecorder
from paceline.replica.state_copier import StateCopier, StateObjects
from paceline.state.snapshots import SnapshotName, Snapshots


class SpanSum(NullRecorder):
    """Recorder that sums the seconds of spans."""

    seconds = 0.0

    @contextmanager
    def span(self, name: str, **fields: object) -> Iterator[None]:
        """Add the time of the block."""
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began


def main() -> None:
    options = _parser().parse_args()
    steps = 10 if options.quick else options.steps
    work = {name: getattr(options, name) for name in ("model", "image_size", "batch", "dtype")}
    work |= {"rows": [options.sync]}
    with (
        connect(LOOPBACK) as ends,
        start(ends, Path(__file__), work, options.ranks) as ranks,
    ):
        answers = [map(float, ranks.ask("step")[0].split()) for _ in range(steps)][2:]
    seconds, copies, sizes = zip(*answers, strict=True)
    print(f"{len(seconds)} steps of {options.sync}, each with a snapshot: median (95 %)")
    pairs = list(zip(seconds, copies, strict=True))
    print(f"{'a step without them, ms':28}{median_of([(s - c) * 1000 for s, c in pairs])}")
    print(f"{'a snapshot, ms':28}{median_of([c * 1000 for c in copies])}")
    print(f"{'share, %':28}{median_of([c / (s - c) * 100 for s, c in pairs])}")
    print(f"{'memory, MB':28}{sizes[-1] / 1e6:.2f}")


def serve(setting: Setting) -> None:
    """Be a rank: answer the seconds of a step and of its copies, and the bytes of snapshots."""
    torch.set_num_threads(1)
    keep_freed_memory()
    training, snapshots, spans = Training(setting), Snapshots(), SpanSum()
    (sync,) = setting.rows
    replica = bind(training, setting, meet(setting, "snapshots"), SyncConfig(sync=sync))
    objects = StateObjects(model=training.model, optimizer=training.optimizer)
    numbers = count()

    def step(number: int) -> None:
        name = SnapshotName("token", number)
        replica.take_snapshot(StateCopier(snapshots, name, objects, {"step": number}, spans))
        with replica.step(number, 1 / setting.ranks):
            training.step()
        snapshots.commit(name)

    step(next(numbers))
    print("ready", flush=True)
    for _ in sys.stdin:
        spans.seconds = 0.0
        seconds = timed(partial(step, next(numbers)))
        print(seconds, spans.seconds, snapshots.nbytes, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = partial(parser.add_argument, help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="10 steps")
    add("--steps", type=int, default=60)
    add("--ranks", type=int, default=2)
    add("--sync", choices=["allreduce", "notified"], default="notified")
    add("--model", default="resnet20")
    add("--image-size", type=int, default=32)
    add("--batch", type=int, default=32, help="images a rank; default: %(default)s")
    add("--dtype", choices=["float", "bfloat16"], default="float")
    return parser


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        serve(Setting(**json.loads(sys.argv[1])))
    else:
        try:
            main()
        except KeyboardInterrupt:
            sys.exit(130)
