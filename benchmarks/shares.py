"""Two workers, one of them limited to a third of a core: equal shares, and shares by speed.

    sudo python benchmarks/shares.py [--quick] [--models resnet20 resnet50] [--rounds 3]
    sudo python benchmarks/shares.py --models resnet20 --plot docs/shares.svg

Each worker has a core of its own, and one thread. The limit is a cgroup's, which needs root and the
controller `cpu`; where the machine can't make one, the program says so and ends with status 1. Each
figure is of a run of its own, in interleaved rounds:

    fast, slow    one worker alone with the whole batch, unlimited and limited
    equal         both, each with half of the batch
    measured      both, `shares="measured"`, after the shares have settled

A ratio is images/s divided by the sum of fast and slow of the same round; the median has a 95%
interval by bootstrap. Then one run is limited in its middle and freed again. For each change the
program prints the number of steps until the shares stay within 5% of the batch of their last value,
and within 10% of that value. It also prints the limited worker's share of each step. `--plot FILE`
makes this last run alone, of one model, and draws it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from socket import socket
from typing import Any

import torch
from command_line import Options, run_script
from rounds import interleaved, median_of, paired_ratio
from shares_plot import picture
from table import print_table
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline.models.zoo import build_model

PERIOD_US, CORE_PART = 5_000, 1 / 3  # of the limit; a short period, as of a core that is slow
CGROUPS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))
SETTLING, TIMED = 40, 10  # steps
ALONE_SETTLING = 3
PHASE = 30  # steps between two changes of the limit
WORK = {"resnet20": (128, 32, 10), "resnet50": (96, 64, 100)}  # batch, image size, labels
TITLES = ["", "images/s", "of the sum of both"]


def main() -> int:
    parser = Options(__doc__, quick="one round of few steps", markdown=True)
    parser.add("--models", nargs="+", choices=WORK, default=list(WORK))
    parser.add("--rounds", type=int, default=3)
    parser.add("--plot", type=Path, help="draw the run with changes of speed, as SVG")
    options = parser.parse_args()
    if options.plot and len(options.models) != 1:
        parser.error("--plot draws one model: give one with --models, such as --models resnet20")
    if len(os.sched_getaffinity(0)) < 2:
        print("shares.py needs two cores, one a worker.")
        return 1
    try:
        with limited_group() as group:
            for model in options.models:
                compare(model, group, options)
    except OSError as error:
        print(f"not measured: no cgroup can be made here ({error}); run it as root.")
        return 1
    return 0


def compare(model: str, group: Path, options: argparse.Namespace) -> None:
    """Print a model's table, and how the shares react."""
    settling, timed, phase, rounds = SETTLING, TIMED, PHASE, options.rounds
    if options.quick:
        settling, timed, phase, rounds = 20, 3, 15, 1
    if options.plot:
        react(model, group, phase, options.plot)
        return
    speed = partial(images_per_second, model, group, timed=timed)
    contenders = {
        "fast": partial(speed, [False], settling=ALONE_SETTLING),
        "slow": partial(speed, [True], settling=ALONE_SETTLING),
        "equal": partial(speed, [False, True], settling=ALONE_SETTLING),
        "measured": partial(speed, [False, True], settling=settling, shares="measured"),
    }
    found = interleaved(contenders, rounds)
    both = [fast + slow for fast, slow in zip(found["fast"], found["slow"], strict=True)]
    batch, size, _ = WORK[model]
    print(f"\n{model}, {batch} images of {size} x {size} a step, {rounds} rounds:")
    lines = [TITLES]
    for name, rates in found.items():
        lines.append([name, f"{median_of(rates):.1f}", f"{paired_ratio(rates, both)}"])
    print_table(lines, [10, 26, 26], markdown=options.markdown)
    react(model, group, phase)


def react(model: str, group: Path, phase: int, plot: Path | None = None) -> None:
    """Limit the second worker in the middle of a run and free it again; print its shares.

    Args:
        model: what is trained.
        group: the cgroup of the second worker.
        phase: steps before the first change, and between the changes.
        plot: the file to draw the run into; None: none.
    """
    release(group)
    batch = WORK[model][0]
    counts, times, changes = [], [], {phase: limit, 2 * phase: release}
    with workers(model, [False, True], group, steps=3 * phase, shares="measured") as ranks:
        for line in steps_of(ranks[0]):
            counts.append(line["counts"])
            times.append(line["time"])
            if line["step"] + 1 in changes:
                changes[line["step"] + 1](group)
    shares = [slow for _, slow in counts]
    for begin, what in ((phase, "limited to a third of a core"), (2 * phase, "freed again")):
        part = shares[begin : begin + phase]
        last = part[-1]
        print(
            f"{what}: {_settled(part, 0.05 * batch)} steps until within 5 % of the batch of its "
            f"last share, {last}, and {_settled(part, 0.1 * last)} until within 10 % of that share"
        )
    print(f"shares of the limited worker, step by step: {' '.join(map(str, shares))}", flush=True)
    if plot:
        each = [None, *(1000 * (end - begin) for begin, end in pairwise(times))]
        what = {phase: "slowed to a third", 2 * phase: "freed again"}
        plot.write_text(picture(counts, each, what, ("worker 0", "worker 1, which is slowed")))


def _settled(shares: Sequence[int], distance: float) -> int:
    """Count the steps until shares were and stayed within a distance of the last one."""
    outside = [at for at, share in enumerate(shares) if abs(share - shares[-1]) > distance]
    return outside[-1] + 1 if outside else 0


def images_per_second(
    model: str, group: Path, slow: Sequence[bool], *, settling: int, timed: int, shares: str = ""
) -> float:
    """Train with a worker for each item of `slow`, limited or not; return images/s."""
    limit(group)
    steps = settling + timed
    with workers(model, slow, group, steps=steps, shares=shares or "equal") as ranks:
        times = [line["time"] for line in steps_of(ranks[0])]
    return WORK[model][0] * timed / (times[-1] - times[-1 - timed])


@contextmanager
def workers(
    model: str, slow: Sequence[bool], group: Path, **options: Any
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start the workers; those that are slow are members of the limited group."""
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cores, ranks = sorted(os.sched_getaffinity(0)), []
    try:
        for rank, is_slow in enumerate(slow):
            words = {"model": model, "core": cores[1 if is_slow else 0], **options}
            words["group"] = str(group) if is_slow else ""
            variables = {
                **{"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"},
                **{"WORLD_SIZE": str(len(slow)), "LOCAL_WORLD_SIZE": str(len(slow))},
                **{"MASTER_PORT": str(port), "GROUP_RANK": "0", "OMP_NUM_THREADS": "1"},
            }
            command = [sys.executable, __file__, json.dumps(words)]
            environment = {**os.environ, **variables}
            ranks.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
            )
        yield ranks
        for one in ranks:
            if one.wait(timeout=120):
                raise RuntimeError(f"a worker ended with status {one.returncode}")
    finally:
        for one in ranks:
            one.kill()
            one.wait()


def steps_of(rank: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """Yield what a worker prints of each step."""
    assert rank.stdout is not None
    for line in rank.stdout:
        if line.startswith("{"):
            yield json.loads(line)


def work(model: str, core: int, group: str, steps: int, shares: str) -> None:
    """Train as a worker; print each step's number, end and shares."""
    os.sched_setaffinity(0, {core})
    if group:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    batch, size, labels = WORK[model]
    images = torch.randn(8 * batch, 3, size, size)
    data = TensorDataset(images, torch.randint(0, labels, (len(images),)))
    with paceline.join(first_iter_timeout=300, timeout=300) as world:
        net = build_model(model, num_labels=labels, num_channels=3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        alone = world.world_size == 1
        how = {"sync": "allreduce"} if alone else {"sync": "notified", "shares": shares}
        paceline.parallelize(net, optimizer, world, **how)
        loader = paceline.loader(data, batch, world)
        while True:
            for x, y in loader:
                if world.steps == steps:
                    return
                cuts = world._position.waiting[-1].cuts
                with world.step():
                    F.cross_entropy(net(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                counts = [end - begin for begin, end in pairwise(cuts)]
                line = {"step": world.steps - 1, "time": time.perf_counter(), "counts": counts}
                print(json.dumps(line), flush=True)


@contextmanager
def limited_group(name: str = "") -> Iterator[Path]:
    """Make a cgroup whose members share a third of a core; remove it in the end."""
    root = next((one for one in CGROUPS if (one / "cgroup.procs").exists()), CGROUPS[-1])
    group = root / f"paceline-shares-{os.getpid()}{name and f'-{name}'}"
    group.mkdir()
    try:
        if not (group / "cpu.cfs_quota_us").exists() and not (group / "cpu.max").exists():
            raise OSError(f"{group} has no controller cpu")
        limit(group)
        yield group
    finally:
        for _ in range(50):  # its last members end at any moment
            with suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


def limit(group: Path) -> None:
    """Limit a group to a third of a core."""
    _set_quota(group, round(CORE_PART * PERIOD_US))


def release(group: Path) -> None:
    """Take the limit from a group."""
    _set_quota(group, None)


def _set_quota(group: Path, microseconds: int | None) -> None:
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{microseconds or 'max'} {PERIOD_US}")
    else:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(microseconds or -1))


if __name__ == "__main__":
    run_script(main, lambda words: work(**words))
