"""What a background checkpoint costs: the share of a run's throughput at one a minute.

    python benchmarks/checkpoint.py [--quick]

ResNet-50 on 2 ranks over loopback, as in `step.py`. Runs can't be compared to one per cent, so the
cost is added up from spans, a checkpoint at a time:

    quiet steps │ settle, copy │ step │ step │ step │ step …
                │◀─ stall ────▶├── file is written ──┤

It is the stall and all steps that began while the file was being written, less as many quiet ones
(their median, from right before). Rank 0 saves and the others wait for it, so its clock tells. The
file is synced to the disk under --folder, so its speed counts.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median

import torch
from command_line import Options, run_script
from links import LOOPBACK, connect
from rank_setup import open_store
from ranks import Ranks, start
from rounds import Interval, median_of
from variants import Setting, Training, bind
from workloads import work_of

from paceline.cluster.membership.snapshot_name import SnapshotName
from paceline.cluster.membership.static import StaticMembership
from paceline.cluster.supervision.allocator import keep_freed_memory
from paceline.config.world import SyncConfig
from paceline.replica.state_parts import PARAMETERS
from paceline.snapshots.checkpoint_entries import checkpoint_entries
from paceline.snapshots.copier import StateCopier
from paceline.snapshots.objects import StateObjects
from paceline.snapshots.store import SnapshotStore
from paceline.state.checkpoint_files import Checkpoints
from paceline.state.checkpoint_writer import Checkpoint, CheckpointWriter

MINUTE = 60  # seconds


@dataclass(frozen=True, kw_only=True)
class Saving(Setting):
    """Setting of a rank; `folder` is where checkpoints go."""

    folder: str


@dataclass(frozen=True, kw_only=True)
class Spans:
    """What rank 0 saw of one checkpoint, in seconds.

    Attributes:
        quiet: a step while nothing is written.
        stall: settling, the copy in memory, and the start of the writer.
        writing: each step that began while the file was being written.
    """

    quiet: float
    stall: float
    writing: list[float]

    @property
    def cost(self) -> float:
        """Seconds that the checkpoint took from the training."""
        return self.stall + sum(self.writing) - len(self.writing) * self.quiet


def main() -> None:
    options = _parser().parse_args()
    checkpoints = 3 if options.quick else options.checkpoints
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        work = work_of(options)
        work |= {"rows": [], "folder": folder}
        program = Path(__file__)
        with connect(LOOPBACK) as ends, start(ends, program, work, options.ranks) as ranks:
            measure(ranks, 1, options.steps)  # its copy is into fresh memory
            print_spans([measure(ranks, 2 + i, options.steps) for i in range(checkpoints)])


def measure(ranks: Ranks, files: int, steps: int) -> Spans:
    """Run quiet steps, save, and run steps until `files` files in all are written."""
    quiet = [float(ranks.ask("step")[0].split()[0]) for _ in range(steps)]
    stall, written = ranks.ask("save")[0].split()
    writing = []
    while int(written) < files:
        seconds, written = ranks.ask("step")[0].split()
        writing.append(float(seconds))
    return Spans(quiet=median(quiet), stall=float(stall), writing=writing)


def serve(setting: Saving) -> None:
    """Be a rank: at a line "step" or "save", print the seconds, and the files written so far."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as any worker of Paceline does; the other methods have it too
    training = Training(setting)
    replica = bind(
        training, setting, open_store(setting, "checkpoint"), SyncConfig(sync="allreduce")
    )
    objects = StateObjects(model=training.model, optimizer=training.optimizer)
    writer = CheckpointWriter(
        Checkpoints(Path(setting.folder), keep=1), constant={}, membership=StaticMembership()
    )
    numbers, files = count(), count()

    def step() -> None:
        replica.begin(next(numbers), 1 / setting.ranks)
        training.step()
        replica.end()

    def save() -> None:
        replica.settle()
        if setting.rank == 0:
            snapshots, name = SnapshotStore(), SnapshotName("benchmark", next(files))
            replica.copy_now(StateCopier(snapshots, name, objects, {}))
            state = snapshots.state(name)
            entries = {**checkpoint_entries(state, objects), "position": {}}
            parameters = state[PARAMETERS]
            writer.publish(
                Checkpoint(name=name, step=name.step, state=entries, parameters=parameters)
            )

    step()
    print("ready", flush=True)
    for command in sys.stdin:
        seconds = timed({"step": step, "save": save}[command.strip()])
        print(seconds, writer.published.qsize(), flush=True)


def timed(function: Callable[[], None]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def print_spans(spans: list[Spans]) -> None:
    """Print the medians."""
    rows: dict[str, Interval] = {
        "a quiet step, ms": median_of([s.quiet * 1000 for s in spans]),
        "stall, ms": median_of([s.stall * 1000 for s in spans]),
        "steps while writing": median_of([len(s.writing) for s in spans]),
        "cost, ms": median_of([s.cost * 1000 for s in spans]),
        "cost at one a minute, %": median_of([s.cost / MINUTE * 100 for s in spans]),
    }
    print(f"{len(spans)} checkpoints: median (95 %)")
    for name, interval in rows.items():
        print(f"{name:28}{interval}")


def _parser() -> Options:
    parser = Options(__doc__, quick="3 checkpoints")
    parser.add("--checkpoints", type=int, default=15)
    parser.add("--steps", type=int, default=8, help="quiet ones")
    parser.add("--ranks", type=int, default=2)
    parser.add("--model", default="resnet50")
    parser.add("--image-size", type=int, default=64)
    parser.add("--batch", type=int, default=16, help="images a rank")
    parser.add("--dtype", choices=["float", "bfloat16"], default="float")
    parser.add("--folder", help="default: the system's folder for temporary files")
    return parser


if __name__ == "__main__":
    run_script(main, lambda work: serve(Saving(**work)))
