"""What a killed worker costs: the parts of a recovery, beside torchrun's restart of all workers.

    python benchmarks/recovery.py [--model resnet20 resnet50] [--kills 100] [--peer torchrun|none]
        [--peer-kills 20] [--sync allreduce notified] [--markdown] [--kills 3 for a look]

Four workers on this machine; in each run, three of them are killed by SIGKILL, one after another,
at drawn moments and drawn ranks. No worker is restarted by Paceline: the others continue. Figures
are medians over the kills, in seconds, of the survivor that is the last to train again; `sum` is
from the kill until all survivors have begun a step, and `p98` its 98th percentile. `replay` is what
repeated the steps since the last snapshot; S is the interval between two, which Paceline measures.

torchrun runs plain DDP (`recovery_ddp.py`) on the same work: the same model, batch, number of
workers and moments, with a checkpoint in each S-th step. It restarts all four workers. Runs of both
alternate. ResNet-20 has 32 x 32 images, ResNet-50 64 x 64.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
from command_line import Options, run_script
from recovery_runs import (
    PARTS,
    WORK,
    WORKERS,
    Moment,
    PacelineRun,
    Recovery,
    RunFailed,
    TorchrunRun,
    kill_workers,
    moments,
    started,
)
from table import print_table

TITLES = ["", "kills", "failed", *PARTS, "sum", "p98", "replay", "steps", "S"]
WIDTHS = [28, 6, 8, *[10] * len(PARTS), 8, 8, 8, 7, 6]


def main() -> int:
    options = _parser().parse_args()
    print(f"{WORKERS} workers, {WORKERS - 1} kills a run; medians in seconds")
    failed = 0
    for model in options.model:
        measured = _measure(model, options)
        lines = [_line(f"{model}, {name}", found, failures) for name, found, failures in measured]
        print_table([TITLES, *lines], WIDTHS, markdown=options.markdown)
        failed += sum(failures for *_, failures in measured)
    return 1 if failed else 0


def _measure(model: str, options: argparse.Namespace) -> list[tuple[str, Sequence[Recovery], int]]:
    """Kill workers of a model's runs, by turns of both contenders."""
    own: list[Recovery] = []
    peer: list[Recovery] = []
    failures = [0, 0]
    wanted_of_peer = 0 if options.peer == "none" else min(options.peer_kills, options.kills)
    number = 0
    while len(own) + failures[0] < options.kills or len(peer) + failures[1] < wanted_of_peer:
        schedule = moments(number)
        if len(own) + failures[0] < options.kills:
            sync = options.sync[number % len(options.sync)]
            failures[0] += _killed(own, schedule[: options.kills - len(own)], model, sync=sync)
        if len(peer) + failures[1] < wanted_of_peer:
            intervals = [one.interval for one in own if one.interval]
            interval = int(median(intervals)) if intervals else 1
            shown = schedule[: wanted_of_peer - len(peer)]
            failures[1] += _killed(peer, shown, model, interval=interval)
        number += 1
        done = f"{model}: {len(own)} kills, {len(peer)} of torchrun's workers"
        print(done, file=sys.stderr, flush=True)
    found: list[tuple[str, Sequence[Recovery], int]] = [("Paceline", own, failures[0])]
    return found + ([("torchrun", peer, failures[1])] if wanted_of_peer else [])


def _killed(
    found: list[Recovery],
    schedule: Sequence[Moment],
    model: str,
    *,
    sync: str = "",
    interval: int = 0,
) -> int:
    """Start a run and kill its workers; add what each kill cost; return how many failed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if interval:
            command = TorchrunRun.command(model, folder, interval)
        else:
            command = PacelineRun.command(model, sync)
        before = len(found)
        try:
            with started(command, folder):
                run = TorchrunRun(folder, interval) if interval else PacelineRun(folder)
                for recovery in kill_workers(run, schedule):
                    found.append(recovery)
        except RunFailed as error:
            print(f"failed: {error}", file=sys.stderr, flush=True)
            return len(schedule) - (len(found) - before)
    return 0


def _line(name: str, found: Sequence[Recovery], failures: int) -> list[str]:
    """Return a contender's line of the table."""
    if not found:
        return [name, "0", str(failures), *[""] * (len(TITLES) - 3)]
    parts = [""] * len(PARTS)
    if found[0].parts:
        parts = [f"{median(each.parts[part] for each in found):.3f}" for part in PARTS]
    sums = [each.resumed for each in found]
    replays = [each.replayed - each.resumed for each in found]
    intervals = [each.interval for each in found if each.interval] or [0]
    return [
        *(name, str(len(found)), str(failures), *parts),
        *(f"{median(sums):.2f}", f"{np.percentile(sums, 98):.2f}", f"{median(replays):.2f}"),
        *(f"{median(each.steps for each in found):g}", f"{median(intervals):g}"),
    ]


def _parser() -> Options:
    parser = Options(__doc__, markdown=True)
    parser.add("--model", choices=list(WORK), default=list(WORK), nargs="+")
    parser.add("--kills", type=int, default=100)
    parser.add("--peer", choices=["torchrun", "none"], default="torchrun")
    parser.add("--peer-kills", type=int, default=20)
    parser.add(
        "--sync", choices=["allreduce", "notified"], default=["allreduce", "notified"], nargs="+"
    )
    return parser


if __name__ == "__main__":
    run_script(main)
