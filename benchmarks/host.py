"""Host time of a training step: plain torch, torch's DDP and Paceline, where nothing is large.

    python benchmarks/host.py [--quick] [--ranks 1 2] [--fused] [--markdown]

160 layers of Linear(32, 32), batch 8, one thread a rank: arithmetic takes little of such a step,
and what Python and torch's dispatch take, most of it. A GPU waits for the same work where its
kernels are short. Paceline's row is the loop of a script: `paceline.join()`, `parallelize`, `with
world.step()`, with all defaults; `run` is the same with a run folder, where snapshots are copied in
a world of one, too. With two ranks each keeps to a core of its own, and `notified` and `allreduce`
are different starts, each beside its own plain torch and DDP.

All contenders of a start live in the same processes and run in turns, a few steps each; a turn is
timed as in `ranks.py`. Ratios are of time, with 95 % intervals: less is better. The last column
counts the operations that a step's own thread calls in torch. `PYTHONPATH` chooses the Paceline of
another checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from command_line import Options, run_script
from rounds import interleaved, paired_ratio
from table import print_table
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import paceline

LAYERS, SIZE, BATCH = 160, 32, 8
PLAIN = "plain"
DDP = {"ddp:25": 25.0, "ddp:0.25": 0.25}
STARTS = {1: ["paceline", "run"], 2: ["notified", "allreduce"]}
WARM_UP = 15  # more than the steps that are checked for mistakes of a script
TITLES = ["", "ms a step", "time / plain torch's", "/ DDP's best", "calls into torch"]
WIDTHS = [20, 10, 24, 24, 18]
LIMIT = timedelta(seconds=60)

Step = Callable[[], None]


def main() -> None:
    options = _parser().parse_args()
    if options.quick:
        options.rounds, options.steps = 2, 2
    chosen = "fused SGD" if options.fused else "SGD"
    print(
        f"{LAYERS} layers of Linear({SIZE}, {SIZE}), batch {BATCH}, {chosen} with momentum; "
        f"{options.rounds} rounds of {options.steps} steps",
        flush=True,
    )
    for ranks in options.ranks:
        lines = [TITLES]
        for start in STARTS[ranks]:
            lines += _lines(start, _run(start, ranks, options))
        print(f"\n{ranks} rank{'s' * (ranks > 1)}:\n")
        print_table(lines, WIDTHS, markdown=options.markdown)


def _run(start: str, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run the contenders of a start; return their milliseconds a step and their calls."""
    with tempfile.TemporaryDirectory() as folder:
        work = {"start": start, "ranks": ranks, "folder": folder}
        work |= {name: getattr(options, name) for name in ("rounds", "steps", "fused")}
        command = [sys.executable, __file__, json.dumps(work)]
        if ranks > 1:
            launch = "from paceline.cli.main import main; main()"
            flags = ["launch", "-n", str(ranks), "--use_cpu", "--"]
            command = [sys.executable, "-c", launch, *flags, *command]
        done = subprocess.run(command, stdout=sys.stderr, check=False)
        if done.returncode:
            raise SystemExit(f"{start}: the ranks ended; what they said is above.")
        results: dict[str, Any] = json.loads((Path(folder) / "results").read_text())
        return results


def _lines(start: str, results: dict[str, Any]) -> list[list[str]]:
    milliseconds, calls = results["milliseconds"], results["calls"]
    best = min(DDP, key=lambda row: median(milliseconds[row]))
    lines = []
    for row in (PLAIN, best, start):
        spans = milliseconds[row]
        ratios = [f"{paired_ratio(spans, milliseconds[other]):.3f}" for other in (PLAIN, best)]
        lines.append([row, f"{median(spans):.2f}", *ratios, str(calls[row])])
    return lines


def be_rank(work: dict[str, Any]) -> None:
    """Run all contenders in turns, in step with the other ranks; rank 0 writes the results."""
    torch.set_num_threads(1)
    start, ranks, folder = work["start"], work["ranks"], Path(work["folder"])
    run = folder / "run" if start == "run" else None
    world = paceline.join(run=run, device="cpu")
    torch.set_num_threads(1)
    _keep_to_own_core(world.rank, ranks)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=ranks, timeout=LIMIT)
    fused = work["fused"] or None
    model, optimizer = _training(fused)
    steps = {PLAIN: _step(model, optimizer)}
    for row, bucket_mb in DDP.items():
        model, optimizer = _training(fused)
        steps[row] = _step(_distributed(model, bucket_mb), optimizer)
    model, optimizer = _training(fused)
    sync = {"sync": start} if ranks > 1 else {}
    model, optimizer = paceline.parallelize(model, optimizer, world, **sync)
    steps[start] = _step_of_world(world, _step(model, optimizer))
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    calls = {row: _calls(step) for row, step in steps.items()}
    world.settle()
    finish = {start: world.settle}
    turns = {
        row: partial(_timed, step, finish.get(row, _nothing), work["steps"])
        for row, step in steps.items()
    }
    own = interleaved(turns, work["rounds"])
    table = torch.tensor(list(own.values()), dtype=torch.float64)
    dist.all_reduce(table)
    milliseconds = dict(zip(own, (table / ranks * 1000).tolist(), strict=True))
    if world.rank == 0:
        results = {"milliseconds": milliseconds, "calls": calls}
        (folder / "results").write_text(json.dumps(results))
    world.close()
    dist.destroy_process_group()


def _keep_to_own_core(rank: int, ranks: int) -> None:
    """Run this rank on one core; see `ranks.keep_to_own_cores`."""
    cores = sorted(os.sched_getaffinity(0))
    if ranks <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})


def _training(fused: bool | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(LAYERS)))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=fused)


def _distributed(model: nn.Module, bucket_mb: float) -> nn.Module:
    with warnings.catch_warnings():  # 2.13 has a new name for broadcast_buffers, 2.11 hasn't
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(
            model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True, broadcast_buffers=False
        )


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    inputs, targets = torch.randn(BATCH, SIZE), torch.randn(BATCH, SIZE)

    def step() -> None:
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _step_of_world(world: paceline.World, inner: Step) -> Step:
    def step() -> None:
        with world.step():
            inner()

    return step


def _timed(step: Step, finish: Step, steps: int) -> float:
    """Return seconds a step in the steady state, as `ranks.timed`."""
    step()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    seconds = time.perf_counter() - start
    finish()
    return seconds / steps


def _calls(step: Step) -> int:
    """Count the operations that this thread calls in torch in one step, after one like it."""
    step()
    with _Counter() as counter:
        step()
    return counter.calls


class _Counter(TorchDispatchMode):
    """Counter of operations."""

    calls = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.calls += 1
        return function(*args, **(kwargs or {}))


def _nothing() -> None:
    """Leave everything as it is: nothing is under way."""


def _parser() -> Options:
    parser = Options(__doc__, quick="2 rounds of 2 steps", markdown=True)
    parser.add("--rounds", type=int, default=25)
    parser.add("--steps", type=int, default=20)
    parser.add("--ranks", type=int, nargs="+", choices=sorted(STARTS), default=sorted(STARTS))
    parser.add("--fused", action="store_true", help="torch's fused SGD in all rows")
    return parser


if __name__ == "__main__":
    run_script(main, be_rank)
