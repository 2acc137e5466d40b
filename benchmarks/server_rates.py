"""Three workers of uneven speed: what each exchange makes of what they could do apart.

    sudo python benchmarks/server_rates.py [--quick] [--plot FILE]

    always     worker 0 has a third of a core at most, all the time
    in turn    each worker has, for the time of two steps, then the next one

The limit is a cgroup's (v1 or v2), which needs root. Workers, and the server, share the machine's
cores, and train ResNet-20 on random images. A ratio is images/s of all workers divided by those
that the same three make at once, under the same limits, without any exchange (`none`), in the same
round. A way that this version refuses is left out, with the sentence. At the end: how stale the
parameters were that the steps read.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from rounds import interleaved, median_of, paired_ratio
from server_ways import RefusedError, histogram, launch_command, reason_in
from shares import limit, limited_group, release
from shares_plot import bars
from table import print_table
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.models.zoo import build_model

WORKERS = 3
NONE = "none"
ALWAYS = [
    *("server", "server measured", "server:staleness=2", "server:staleness=2 measured"),
    *("server:staleness=async", "notified measured"),
]
IN_TURN = ["server", "server:staleness=2", "server:staleness=8", "server:staleness=async"]
TITLES = ["", "images/s", "of what they make apart", "staleness of the reads"]
WIDTHS = [30, 24, 24, 40]
START_S = 300.0
END_S = 20.0


class Rates:
    """Runs ways under limits; keeps the staleness that each had.

    Args:
        groups: a cgroup for each worker.
        batch: images of a global batch.
        settling: seconds from the limits to the measurement.
        timed: seconds that are measured.
    """

    def __init__(self, groups: Sequence[Path], batch: int, settling: float, timed: float) -> None:
        self._groups = groups
        self._batch = batch
        self._settling = settling
        self._timed = timed
        self.reads: dict[str, Counter[str]] = {}

    def step_seconds(self) -> float:
        """Return the time of a step of all workers at once, unlimited and without an exchange."""
        return self._batch / self.images_per_second(NONE, lambda groups, ended: None)

    def images_per_second(
        self, way: str, slow: Callable[[Sequence[Path], threading.Event], None]
    ) -> float:
        """Train by a way; return the images/s of all workers.

        Args:
            way: what `parallelize` gets as `sync`, and " measured" for shares by speed; or `NONE`.
            slow: sets the limits of the groups, until the event is set.

        Raises:
            RefusedError: the run failed.
        """
        for group in self._groups:
            release(group)
        with tempfile.TemporaryDirectory() as folder, self._started(way, Path(folder)) as running:
            logs = [Path(folder, str(rank)) for rank in range(WORKERS)]
            _await_steps(running, logs)
            ended = threading.Event()
            slowing = threading.Thread(target=slow, args=(self._groups, ended), name="slowing")
            slowing.start()
            time.sleep(self._settling)
            begin = time.monotonic()
            time.sleep(self._timed)
            end = time.monotonic()
            ended.set()
            slowing.join()
            if running.poll() is not None:
                raise RefusedError(_said(folder))
            steps = [_steps(log, begin, end) for log in logs]
        self.reads[way] = Counter()
        for first, *_, last in steps:
            self.reads[way].update(last["staleness"])
            self.reads[way].subtract(first["staleness"])
        return sum(
            (last["images"] - first["images"]) / (last["time"] - first["time"])
            for first, *_, last in steps
        )

    @contextmanager
    def _started(self, way: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
        """Start the workers of a way, and its server; end all of them afterwards."""
        words = {
            "way": way,
            "batch": self._batch,
            "folder": str(folder),
            "groups": list(map(str, self._groups)),
        }
        command = [*launch_command(WORKERS, way), sys.executable, __file__]
        with (folder / "said").open("wb") as said:
            process = subprocess.Popen(
                [*command, "--worker", json.dumps(words)], stdout=said, stderr=said
            )
        try:
            yield process
        finally:
            for group in self._groups:
                release(group)  # what is throttled ends late
            family = []
            if process.poll() is None:
                family = psutil.Process(process.pid).children(recursive=True)
            process.terminate()
            psutil.wait_procs(family, timeout=END_S)
            for one in family:
                if one.is_running():
                    one.kill()
            process.kill()
            process.wait()


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


def _await_steps(running: subprocess.Popen[bytes], logs: Sequence[Path]) -> None:
    """Wait until each worker has logged a step.

    Raises:
        RefusedError: the run ended before.
    """
    deadline = time.monotonic() + START_S
    while not all(log.exists() and log.stat().st_size for log in logs):
        if running.poll() is not None or time.monotonic() > deadline:
            raise RefusedError(_said(str(logs[0].parent)))
        time.sleep(0.2)


def _said(folder: str) -> str:
    return reason_in(Path(folder, "said").read_text())


def _steps(log: Path, begin: float, end: float) -> list[dict[str, Any]]:
    """Return the steps of a worker that ended in an interval.

    Raises:
        RefusedError: there are fewer than two.
    """
    steps = [json.loads(line) for line in log.read_text().splitlines(keepends=True) if "}" in line]
    inside = [step for step in steps if begin <= step["time"] <= end]
    if len(inside) < 2:
        raise RefusedError("a worker made no two steps in the measured time; use --seconds")
    return inside


def work(way: str, batch: int, folder: str, groups: Sequence[str]) -> None:
    """Train as a worker until the parent ends this process; log each step."""
    torch.set_num_threads(1)
    world = paceline.join(snapshots=False, replica_check=False, first_iter_timeout=START_S)
    Path(groups[world.rank], "cgroup.procs").write_text(str(os.getpid()))
    model: Any = build_model("resnet20", num_labels=10, num_channels=3)
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = torch.randn(32 * batch, 3, 32, 32)
    data = TensorDataset(images, torch.randint(0, 10, (len(images),)))
    if way == NONE:
        batches: Any = DataLoader(data, batch // WORKERS, shuffle=True, drop_last=True)
    else:
        sync, _, shares = way.partition(" ")
        paceline.parallelize(model, optimizer, world, sync=sync, shares=shares or "equal")
        batches = paceline.loader(data, batch, world)
    trained = 0
    with Path(folder, str(world.rank)).open("w") as log:
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


def measure(
    rates: Rates, title: str, ways: Sequence[str], slow: Any, options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Measure ways under a limit, and print their table; return it."""
    print(f"\n{title}:", flush=True)
    left = [NONE]
    for way in ways:
        try:
            rates.images_per_second(way, slow)
        except RefusedError as error:
            print(f"{way}: left out: {error}", flush=True)
        else:
            left.append(way)
    turns = {way: partial(rates.images_per_second, way, slow) for way in left}
    found = interleaved(turns, options.rounds)
    lines = [TITLES]
    for way, values in found.items():
        reads = histogram(rates.reads[way])
        ratio = str(paired_ratio(values, found[NONE]))
        lines.append([way, f"{median_of(values):.1f}", ratio, reads])
    print_table(lines, WIDTHS, markdown=options.markdown)
    return {
        way: {"images/s": values, "staleness": rates.reads[way]} for way, values in found.items()
    }


def main() -> int:
    options = _parser().parse_args()
    if options.worker:
        work(**json.loads(options.worker))
        return 0
    if options.quick:
        options.rounds = 1
        options.seconds = 5.0
        options.settling = 3.0
    with ExitStack() as stack:
        try:
            groups = [stack.enter_context(limited_group(str(n))) for n in range(WORKERS)]
        except OSError as error:
            print(f"server_rates.py needs cgroups with the controller cpu: {error}.")
            return 1
        rates = Rates(groups, options.batch, options.settling, options.seconds)
        seconds = 2 * rates.step_seconds()
        print(f"two steps take {seconds:.2f} s; {options.rounds} rounds of {options.seconds:.0f} s")
        turn = partial(in_turn, seconds)
        found = {
            "always": measure(
                rates, "worker 0 always at a third of a core", options.always, always, options
            ),
            "in turn": measure(
                rates, "each worker in turn, for two steps", options.in_turn, turn, options
            ),
        }
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    if options.plot:
        options.plot.write_text(bars(_histograms(found), "versions behind", "% of the reads"))
    return 0


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = partial(parser.add_argument, help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="one round of 5 s a way")
    add("--rounds", type=int, default=3)
    add("--seconds", type=float, default=20.0)
    add("--settling", type=float, default=15.0)
    add("--batch", type=int, default=96, help="images of a global batch; default: %(default)s")
    add("--always", nargs="*", default=ALWAYS, metavar="SYNC[ measured]")
    add("--in_turn", nargs="*", default=IN_TURN, metavar="SYNC[ measured]")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--plot", type=Path, help="draw the staleness histograms, as SVG")
    parser.add_argument("--markdown", action="store_true", help="print tables as markdown")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
