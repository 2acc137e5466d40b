"""What in-memory snapshots cost: the time of their copies, as a share of a step, and memory.

    python benchmarks/snapshots.py [--quick] [--sync allreduce notified sharded] [--model resnet20]

Two ranks over loopback. A snapshot is copied part by part while the step runs, and nothing is
settled for it. So its cost is the sum of its spans. Every rank takes a snapshot in each step, and
each is committed at once, so that the copies go to memory that is used again. The share is of the
same step without these spans. A last column says what two retained snapshots take, as a multiple of
the model (parameters and buffers). Of a ResNet-50, images of 64 pixels run in reasonable time:

    python benchmarks/snapshots.py --model resnet50 --image-size 64 --batch 16 --steps 20

With --runs, nothing is run: the spans are those that each worker of `paceline train` has recorded
in its event file, those of checkpoints included, without the first steps, which measure S. The last
columns are the replica check's:

    paceline train … --run_id first; python benchmarks/snapshots.py --runs runs/first
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from itertools import chain, count
from pathlib import Path

import numpy as np
import torch
from checkpoint import timed
from command_line import Options, run_script
from links import LOOPBACK, connect
from rank_setup import open_store
from ranks import start
from rounds import median_of
from table import print_table
from variants import Setting, Training, bind
from workloads import work_of

from paceline.cluster.membership.snapshot_name import SnapshotName
from paceline.cluster.supervision.allocator import keep_freed_memory
from paceline.config.world import SyncConfig
from paceline.observe.event_file import find_event_files, read_events
from paceline.snapshots.copier import StateCopier
from paceline.snapshots.objects import StateObjects
from paceline.snapshots.step_snapshots import interval_of
from paceline.snapshots.store import SnapshotStore
from paceline.timeline.timeline import Timeline

METHODS = {
    "allreduce": SyncConfig(sync="allreduce"),
    "notified": SyncConfig(sync="notified"),
    "sharded": SyncConfig(sync="notified", update="sharded"),
}
TITLES = ["sync", "snapshot, ms", "step, ms", "share at S = 1, %", "S < 1 %", "MB", "x model"]
WIDTHS = [10, 24, 32, 24, 10, 10, 10]
RUN_TITLES = ["run", "rank", "steps", "step, ms", "with a snapshot", "share, %"]
RUN_TITLES += ["with a check", "share, %"]
RUN_WIDTHS = [32, 6, 8, 10, 16, 10, 14, 10]
FIRST = 16  # steps


def main() -> None:
    options = _parser().parse_args()
    if options.runs:
        lines = [RUN_TITLES, *(line for run in options.runs for line in _of_run(run))]
        print_table(lines, RUN_WIDTHS, markdown=options.markdown)
        return
    steps = 10 if options.quick else options.steps
    print(f"{options.model}, {options.ranks} ranks, {steps} steps, a snapshot each: median (95 %)")
    lines = [TITLES, *(_measure(options, sync, steps) for sync in options.sync)]
    print_table(lines, WIDTHS, markdown=options.markdown)


def _of_run(run: Path) -> Iterator[list[str]]:
    """Yield for each worker of a run its line of the table."""
    for rank, (_, path) in enumerate(find_event_files(run)):
        events = (event for event in read_events(path) if event["event"] == "step")
        measured = [event for event in events if "snapshot_ms" in event][FIRST:]
        parts = ("compute_ms", "exposed_ms", "send_ms", "update_ms", "snapshot_ms", "check_ms")
        times = np.array([[event.get(part, 0.0) for part in parts] for event in measured])
        seconds = times.sum()
        numbers: list[object] = [f"{seconds / len(times):.1f}"]
        for spent in times.T[-2:]:
            numbers += [np.count_nonzero(spent), f"{100 * spent.sum() / seconds:.3f}"]
        yield list(map(str, [run.name, rank, len(measured), *numbers]))


def _measure(options: argparse.Namespace, sync: str, steps: int) -> list[str]:
    """Run the steps of one method; return its line of the table."""
    work = work_of(options)
    with (
        connect(LOOPBACK) as ends,
        start(ends, Path(__file__), work | {"rows": [sync]}, options.ranks) as ranks,
    ):
        answers = [list(map(float, ranks.ask("step")[0].split())) for _ in range(steps)]
    interval = interval_of([(seconds, copies) for seconds, copies, *_ in answers])
    seconds, copies, memory, model = np.array(answers)[2:].T
    medians = [median_of((1000 * copies).tolist()), median_of((1000 * (seconds - copies)).tolist())]
    share = median_of((100 * copies / (seconds - copies)).tolist())
    numbers = [interval, f"{memory[-1] / 1e6:.1f}", f"{memory[-1] / model[-1]:.2f}"]
    return list(map(str, [sync, *medians, share, *numbers]))


def serve(setting: Setting) -> None:
    """Be a rank: answer the seconds of a step and of its copies, the bytes of these and a model."""
    torch.set_num_threads(1)
    keep_freed_memory()
    training, snapshots, timeline = Training(setting), SnapshotStore(), Timeline()
    (sync,) = setting.rows
    replica = bind(training, setting, open_store(setting, "snapshots"), METHODS[sync])
    objects = StateObjects(model=training.model, optimizer=training.optimizer)
    model = sum(t.nbytes for t in chain(training.model.parameters(), training.model.buffers()))
    numbers = count()

    def step(number: int) -> None:
        name = SnapshotName("token", number)
        replica.copy_in_step(StateCopier(snapshots, name, objects, {"step": number}, timeline))
        replica.begin(number, 1 / setting.ranks)
        training.step()
        replica.end()
        snapshots.commit(name)

    step(next(numbers))
    print("ready", flush=True)
    for _ in sys.stdin:
        before = timeline.seconds("snapshot")
        seconds = timed(partial(step, next(numbers)))
        copies = timeline.seconds("snapshot") - before
        print(seconds, copies, snapshots.nbytes, model, flush=True)


def _parser() -> Options:
    parser = Options(__doc__, quick="10 steps", markdown=True)
    parser.add("--runs", type=Path, nargs="+", help="folders of runs, to read instead")
    parser.add("--steps", type=int, default=60)
    parser.add("--ranks", type=int, default=2)
    parser.add("--sync", choices=list(METHODS), default=list(METHODS), nargs="+")
    parser.add("--model", default="resnet20")
    parser.add("--image-size", type=int, default=32)
    parser.add("--batch", type=int, default=32, help="images a rank")
    parser.add("--dtype", choices=["float", "bfloat16"], default="float")
    return parser


if __name__ == "__main__":
    run_script(main, lambda work: serve(Setting(**work)))
