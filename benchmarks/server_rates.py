"""Three workers of uneven speed: what each exchange makes of what they could do apart.

    sudo python benchmarks/server_rates.py [--quick] [--plot FILE]

    always     worker 0 has a third of a core at most, all the time
    in turn    each worker has, for the time of two steps, then the next one

The limit is a cgroup's (v1 or v2), which needs root. Workers, and the server, share the machine's
cores, and train ResNet-20 on random images. A ratio is images/s of all workers divided by those
that the same three make at once, under the same limits, without any exchange (`none`), in the same
round. A way is started once a round, for both limits. Shares follow the speeds where a way's name
says so, and where it is asynchronous: these settle for longer before they are measured. A way that
this version refuses is left out, with the sentence. At the end: how stale the parameters were that
the steps read. On two idle cores it takes 10 minutes, and with --quick one.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from command_line import Options, run_script
from rounds import median_of, paired_ratio, rotated
from server_ways import RefusedError, histogram, reason_in
from shares import limit, limited_group, release
from shares_plot import bars
from table import print_table
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.cli import serve
from paceline.cluster.membership.control_line.beats import Beats
from paceline.models.zoo import build_model

WORKERS = 3
NONE = "none"
ALWAYS = ["server:staleness=async", "server:staleness=2 measured", "server:staleness=2"]
IN_TURN = ["server:staleness=2", "server"]
TITLES = ["", "images/s", "of what they make apart", "staleness of the reads"]
WIDTHS = [30, 24, 24, 40]
START_S = 120.0
STEADY_SETTLING = 0.2  # of the seconds for which shares settle, where they stay equal
JOB = "rates"
RUN_ID = f"torchrun-{JOB}.0"  # as `paceline.join` calls the run of these variables

Slow = Callable[[Sequence[Path], threading.Event], None]
"""Sets the limits of groups, until the event is set."""


class Rates:
    """Runs ways under limits; keeps the staleness that each had.

    Args:
        groups: a cgroup for each worker.
        batch: images of a global batch.
        settling: seconds from a limit to the measurement, where shares follow the speeds.
        timed: seconds that are measured.

    Attributes:
        reads: how often each staleness occurred, by limit and way.
    """

    def __init__(self, groups: Sequence[Path], batch: int, settling: float, timed: float) -> None:
        self._groups = groups
        self._batch = batch
        self._settling = settling
        self._timed = timed
        self.reads: dict[tuple[str, str], Counter[str]] = {}

    def step_seconds(self) -> float:
        """Return the time of a step of all workers at once, unlimited and without an exchange."""
        rate = self.images_per_second(NONE, {"": lambda groups, ended: None})[""]
        return self._batch / rate

    def images_per_second(self, way: str, limits: Mapping[str, Slow]) -> dict[str, float]:
        """Train by a way, in one start; return the images/s of all workers, by limit.

        Args:
            way: what `parallelize` gets as `sync`, and " measured" for shares by speed; or `NONE`.
            limits: one after another.

        Raises:
            RefusedError: the run failed.
        """
        for group in self._groups:
            release(group)
        with tempfile.TemporaryDirectory() as folder, self._started(way, Path(folder)) as running:
            logs = [Path(folder, str(rank)) for rank in range(WORKERS)]
            _await_steps(running, logs)
            settling = self._settling * (1 if _follows_speeds(way) else STEADY_SETTLING)
            rates = {}
            for name, slow in limits.items():
                steps = self._under(slow, settling, running, logs)
                rates[name] = sum(map(_rate, steps))
                reads = self.reads[name, way] = Counter()
                for first, *_, last in steps:
                    reads.update(last["staleness"])
                    reads.subtract(first["staleness"])
        return rates

    def _under(
        self, slow: Slow, settling: float, running: Sequence[BaseProcess], logs: Sequence[Path]
    ) -> list[list[dict[str, Any]]]:
        """Return each worker's steps of the measured time under a limit.

        Raises:
            RefusedError: a process ended, or is too slow.
        """
        ended = threading.Event()
        slowing = threading.Thread(target=slow, args=(self._groups, ended), name="slowing")
        slowing.start()
        time.sleep(settling)
        begin = time.monotonic()
        time.sleep(self._timed)
        deadline = begin + START_S
        while not all(len(_steps(log, begin)) > 1 for log in logs) and time.monotonic() < deadline:
            time.sleep(0.2)  # where others use the machine, too
        end = time.monotonic()
        ended.set()
        slowing.join()
        for group in self._groups:
            release(group)
        if not all(process.is_alive() for process in running):
            raise RefusedError(_said(logs[0].parent))
        steps = [_steps(log, begin, end) for log in logs]
        if any(len(of_worker) < 2 for of_worker in steps):
            raise RefusedError(f"a worker made no two steps in {START_S:.0f} s")
        return steps

    @contextmanager
    def _started(self, way: str, folder: Path) -> Iterator[Sequence[BaseProcess]]:
        """Start the workers of a way, and its server; end all of them afterwards."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        # Forked: the import of torch would take longer than a measurement.
        context = multiprocessing.get_context("fork")
        work_on = partial(work, way, self._batch, folder, port, self._groups)
        processes: list[BaseProcess] = [
            context.Process(target=_said_into, args=(folder, partial(work_on, rank)))
            for rank in range(WORKERS)
        ]
        if way.startswith("server"):
            words = ("--run_id", RUN_ID, "--master", f"127.0.0.1:{port}")
            serving = partial(serve.main, (*words, "--first_iter_timeout", f"{START_S:.0f}"))
            processes.append(context.Process(target=_said_into, args=(folder, serving)))
        try:
            for process in processes:
                process.start()
            yield processes
        finally:
            for group in self._groups:
                release(group)  # what is throttled ends late
            for process in processes:
                process.kill()
                process.join()


def _follows_speeds(way: str) -> bool:
    """Return whether the workers' shares follow their speeds."""
    return way.endswith(" measured") or "staleness=async" in way


def _said_into(folder: Path, run: Callable[[], object]) -> None:
    """Run what a process does; what it says goes to a file."""
    file = os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    run()


def always(groups: Sequence[Path], ended: threading.Event) -> None:
    """Limit worker 0 to a third of a core."""
    limit(groups[0])
    ended.wait()


def in_turn(seconds: float, groups: Sequence[Path], ended: threading.Event) -> None:
    """Limit one worker after another, each for some seconds."""
    number = 0
    while not ended.is_set():
        limit(groups[number])
        ended.wait(seconds)
        release(groups[number])
        number = (number + 1) % len(groups)


def _await_steps(running: Sequence[BaseProcess], logs: Sequence[Path]) -> None:
    """Wait until each worker has logged a step.

    Raises:
        RefusedError: the run ended before.
    """
    deadline = time.monotonic() + START_S
    while not all(log.exists() and log.stat().st_size for log in logs):
        alive = all(process.is_alive() for process in running)
        if not alive or time.monotonic() > deadline:
            raise RefusedError(_said(logs[0].parent))
        time.sleep(0.05)


def _said(folder: Path) -> str:
    return reason_in((folder / "said").read_text())


def _steps(log: Path, begin: float, end: float = math.inf) -> list[dict[str, Any]]:
    """Return the steps of a worker that ended in an interval."""
    steps = [json.loads(line) for line in log.read_text().splitlines(keepends=True) if "}" in line]
    return [step for step in steps if begin <= step["time"] <= end]


def _rate(steps: Sequence[Mapping[str, Any]]) -> float:
    """Return a worker's images/s."""
    first, *_, last = steps
    rate: float = (last["images"] - first["images"]) / (last["time"] - first["time"])
    return rate


def work(way: str, batch: int, folder: Path, port: int, groups: Sequence[Path], rank: int) -> None:
    """Train as a worker until the parent ends this process; log each step."""
    os.environ |= {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"},
        **{"WORLD_SIZE": str(WORKERS), "LOCAL_WORLD_SIZE": str(WORKERS)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": JOB},
    }
    torch.set_num_threads(1)
    world = paceline.join(snapshots=False, replica_check=False, first_iter_timeout=START_S)
    (groups[rank] / "cgroup.procs").write_text(str(os.getpid()))
    model: Any = build_model("resnet20", num_labels=10, num_channels=3)
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = torch.randn(32 * batch, 3, 32, 32)
    data = TensorDataset(images, torch.randint(0, 10, (len(images),)))
    if way == NONE:
        batches: Any = DataLoader(data, batch // WORKERS, shuffle=True, drop_last=True)
    else:
        sync, _, shares = way.partition(" ")
        paceline.parallelize(model, optimizer, world, sync=sync, shares=shares or "auto")
        batches = paceline.loader(data, batch, world)
    trained = 0
    with (folder / str(rank)).open("w") as log:
        while True:
            for x, y in batches:
                with _step(world, way):
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                trained += len(x)
                step = {"time": time.monotonic(), "images": trained, "staleness": world.staleness}
                log.write(json.dumps(step) + "\n")
                log.flush()


@contextmanager
def _step(world: paceline.World, way: str) -> Iterator[None]:
    if way == NONE:
        yield
        return
    with world.step():
        yield


def measure(rates: Rates, limits: Mapping[str, tuple[Slow, Sequence[str]]], rounds: int) -> Found:
    """Measure ways under limits, each started once a round.

    Args:
        limits: by name: what sets the limit, and the ways that are measured under it.
        rounds: how many.

    Returns:
        images/s, a value a round, by limit and way.
    """
    ways = [NONE, *dict.fromkeys(way for _, listed in limits.values() for way in listed)]
    found: Found = {name: {} for name in limits}
    for number in range(rounds):
        for way in rotated(ways, number):
            its = {n: slow for n, (slow, listed) in limits.items() if way in (NONE, *listed)}
            try:
                for name, rate in rates.images_per_second(way, its).items():
                    found[name].setdefault(way, []).append(rate)
            except RefusedError as error:
                print(f"{way}: left out: {error}", flush=True)
                ways.remove(way)
                for values in found.values():
                    values.pop(way, None)
    return found


Found = dict[str, dict[str, list[float]]]


def _load() -> None:
    """Load what each process would load for itself, for seconds: modules of torch, and kernels."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    Beats(1.0).close()


def main() -> int:
    options = _parser().parse_args()
    if options.quick:
        options.rounds = 1
        options.seconds = 2.0
        options.settling = 4.0
        options.batch = 48
    _load()
    with ExitStack() as stack:
        try:
            groups = [stack.enter_context(limited_group(str(n))) for n in range(WORKERS)]
        except OSError as error:
            print(f"server_rates.py needs cgroups with the controller cpu: {error}.")
            return 1
        rates = Rates(groups, options.batch, options.settling, options.seconds)
        seconds = 2 * rates.step_seconds()
        print(
            f"two steps take {seconds:.2f} s; {options.rounds} rounds of {options.seconds:g} s",
            flush=True,
        )
        limits: dict[str, tuple[Slow, Sequence[str]]] = {
            "worker 0 always at a third of a core": (always, options.always),
            "each worker in turn, for two steps": (partial(in_turn, seconds), options.in_turn),
        }
        measured = measure(rates, limits, options.rounds)
    for title, values in measured.items():
        _print(title, values, rates, options)
    found = {
        title: {
            way: {"images/s": values, "staleness": rates.reads[title, way]}
            for way, values in of_limit.items()
        }
        for title, of_limit in measured.items()
    }
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    if options.plot:
        options.plot.write_text(bars(_histograms(found), "versions behind", "% of the reads"))
    return 0


def _print(
    title: str, found: Mapping[str, list[float]], rates: Rates, options: argparse.Namespace
) -> None:
    """Print the table of a limit."""
    print(f"\n{title}:")
    lines = [TITLES]
    for way, values in found.items():
        reads = histogram({k: n for k, n in rates.reads[title, way].items() if n})
        ratio = str(paired_ratio(values, found[NONE]))
        lines.append([way, f"{median_of(values):.1f}", ratio, reads])
    print_table(lines, WIDTHS, markdown=options.markdown)


def _histograms(found: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the staleness of each way that had any, in percent, for the plot."""
    plotted = {}
    for limits, ways in found.items():
        for way, result in ways.items():
            reads = {stale: count for stale, count in result["staleness"].items() if count}
            if reads:
                everything = sum(reads.values())
                plotted[f"{way}, {limits}"] = {
                    stale: 100 * reads[stale] / everything for stale in sorted(reads, key=int)
                }
    return plotted


def _parser() -> Options:
    parser = Options(__doc__, quick="one round of short measurements", markdown=True, figures=True)
    parser.add("--rounds", type=int, default=5)
    parser.add("--seconds", type=float, default=10.0)
    parser.add("--settling", type=float, default=10.0)
    parser.add("--batch", type=int, default=96, help="images of a global batch")
    parser.add("--always", nargs="*", default=ALWAYS, metavar="SYNC[ measured]")
    parser.add("--in_turn", nargs="*", default=IN_TURN, metavar="SYNC[ measured]")
    parser.add("--plot", type=Path, help="draw the staleness histograms, as SVG")
    return parser


if __name__ == "__main__":
    run_script(main)
