"""The dependency floor of a model: the best that any order of its exchanges could make of a step.

    python benchmarks/floor.py [--quick] [--model resnet50|vgg16|lstm|gpt] [--gbit 1 2.5]
    python benchmarks/floor.py --model gpt --links 1gbit --rows ddp:25 notified

All ranks train alone at the same time, a core each where there are as many, and measure when each
parameter is read in the forward and when its gradient is complete in the backward. `schedules.py`
then computes a step's time at each rate:

    no exchange    the computation alone
    floor          what is read sooner is exchanged first, byte by byte: the dependency floor
    buckets:MB     the same in the buckets that Paceline makes at that size
    barrier        all exchanges end before the update, as DDP's do; no buckets
    no overlap     the exchange begins after the backward

With `--links` the rates are those that plain streams reach on such links, and `--rows` run on them,
as in `step.py`. A row's share is the floor's time divided by its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from command_line import Options, run_script
from links import LOOPBACK, connect, measuring
from ranks import keep_to_own_cores, start
from schedules import Parameter, Profile, barrier, bucketed, floor, no_overlap
from step import measure
from table import one_of, print_table
from torch import nn
from variants import MAKERS, Setting, Training
from workloads import add_work, settled, title_of, work_of, workload_of

from paceline.cluster.supervision.allocator import keep_freed_memory
from paceline.reduce.buckets import partition

TITLES = ["", "ms a step", "share of the floor", "speed / barrier", "speed / no overlap"]
WIDTHS = [16, 10, 20, 17, 20]
WARM_UP = 2  # steps


class PassTimes:
    """Hooks that take the time of each parameter's first read, and of its gradient's completion.

    Attributes:
        reads: for each parameter that was read in this step, when, by `time.perf_counter`.
        readies: for each parameter whose gradient is complete, when.
        forward_end: when the model's forward ended.
        update_begin: when the optimizer's step began.
    """

    def __init__(self, training: Training) -> None:
        self.reads: dict[nn.Parameter, float] = {}
        self.readies: dict[torch.Tensor, float] = {}
        self.forward_end = self.update_begin = 0.0
        self._training = training
        for module in training.model.modules():
            if own := list(module.parameters(recurse=False)):
                module.register_forward_pre_hook(partial(self._read, own))
        for p in training.model.parameters():
            p.register_post_accumulate_grad_hook(self._ready)
        training.model.register_forward_hook(self._forward_ended)
        training.optimizer.register_step_pre_hook(self._update_begins)

    def of_step(self) -> list[float]:
        """Run a step; return its times in seconds.

        They are: forward, backward with the loss, update; for each parameter its read, from the
        forward's beginning; for each its gradient's completion, from the backward's beginning.
        """
        self.reads.clear()
        self.readies.clear()
        begin = time.perf_counter()
        self._training.step()
        end = time.perf_counter()
        named = dict(self._training.model.named_parameters())
        for name, p in named.items():
            if p not in self.reads or p not in self.readies:
                raise SystemExit(f"{name}: no module that owns it reads it, or it has no gradient.")
        spans = np.diff([begin, self.forward_end, self.update_begin, end]).tolist()
        reads = [self.reads[p] - begin for p in named.values()]
        return [*spans, *reads, *(self.readies[p] - self.forward_end for p in named.values())]

    def _read(self, own: list[nn.Parameter], *_: object) -> None:
        for p in own:
            self.reads.setdefault(p, time.perf_counter())

    def _ready(self, parameter: torch.Tensor) -> None:
        self.readies[parameter] = time.perf_counter()

    def _forward_ended(self, *_: object) -> None:
        self.forward_end = time.perf_counter()

    def _update_begins(self, *_: object) -> None:
        self.update_begin = time.perf_counter()


def main() -> None:
    options = settled(parser := _parser())
    if options.quick:
        options.profile_steps, options.rounds, options.steps = 3, 2, 1
    if options.ranks < 2:
        parser.error(f"--ranks {options.ranks}: nothing is exchanged; give 2 or more")
    profile = profile_of_work(options, options.profile_steps)
    spans = [f"{1000 * s:.0f}" for s in (profile.forward, profile.backward, profile.update)]
    print(
        f"{title_of(options)}\n{profile.nbytes / 1e6:.1f} MB of gradients; forward {spans[0]} ms, "
        f"backward {spans[1]} ms, update {spans[2]} ms: medians of {options.profile_steps} steps"
    )
    for gbit in [] if options.links else options.gbit:
        print(f"\n{gbit:g} Gbit/s:\n", flush=True)
        _print(profile, options, gbit, {})
    for link in options.links:
        with measuring(link):
            measured, gbit = measure(link, options)
            print(f"a plain stream carries {gbit:.3g} Gbit/s each way\n")
            _print(profile, options, gbit, {row: median(ms) for row, ms in measured.items()})


def profile_of(times: np.ndarray, sizes: list[int]) -> Profile:
    """Return the medians over (steps, 3 + 2 parameters), each step's as `PassTimes.of_step` has."""
    forward, backward, update, *rest = np.median(times, axis=0).tolist()
    reads, readies = rest[: len(sizes)], rest[len(sizes) :]
    parameters = tuple(
        Parameter(nbytes=nbytes, ready=ready, read=read)
        for nbytes, ready, read in zip(sizes, readies, reads, strict=True)
    )
    return Profile(forward=forward, backward=backward, update=update, parameters=parameters)


def profile_of_work(options: argparse.Namespace, steps: int = 30) -> Profile:
    """Measure the model in so many steps, on all ranks at once."""
    work = work_of(options) | {"rows": []}
    with connect(LOOPBACK) as ends, start(ends, Path(__file__), work, options.ranks) as ranks:
        answers = [map(json.loads, ranks.ask("step")) for _ in range(steps)]
        times = np.array([times for answer in answers for times in answer])
    return profile_of(times, [p.nbytes for p in _parameters(options.model).values()])


def _parameters(model: str) -> dict[str, nn.Parameter]:
    with torch.device("meta"):
        return dict(workload_of(model).build().named_parameters())


def _buckets(model: str, mb: float) -> list[list[int]]:
    """Return the buckets that Paceline makes, each as its parameters' numbers."""
    named = _parameters(model)
    names = {p: name for name, p in named.items()}
    numbers = {p: number for number, p in enumerate(names)}
    found = partition(names, dict.fromkeys(names, 0), round(mb * 2**20))
    return [[numbers[p] for p in bucket.parameters] for bucket in found]


def _print(
    profile: Profile, options: argparse.Namespace, gbit: float, measured: Mapping[str, float]
) -> None:
    """Print a line a schedule, and one a row that was run, in ms."""
    link = options.ranks, gbit
    least, slow = floor(profile, *link), barrier(profile, *link)
    buckets = {f"buckets:{mb:g}": _buckets(options.model, mb) for mb in options.mb}
    seconds = {
        "no exchange": profile.compute,
        "floor": least,
        **{name: bucketed(profile, found, *link) for name, found in buckets.items()},
        "barrier": slow,
        "no overlap": no_overlap(profile, *link),
        **{row: ms / 1000 for row, ms in measured.items()},
    }
    apart = seconds["no overlap"]
    lines = [
        [name, f"{1000 * s:.1f}", *(f"{other / s:.3f}" for other in (least, slow, apart))]
        for name, s in seconds.items()
    ]
    print_table([TITLES, *lines], WIDTHS, markdown=options.markdown)


def _serve(setting: Setting) -> None:
    """Be a rank: run a step alone for each line, and answer its times."""
    keep_to_own_cores(setting.rank, setting.ranks)
    torch.set_num_threads(1)
    keep_freed_memory()
    times = PassTimes(Training(setting))
    for _ in range(WARM_UP):
        times.of_step()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(times.of_step()), flush=True)


def _parser() -> Options:
    parser = Options(__doc__, quick="3 steps, and 2 rounds of one step", markdown=True)
    parser.add("--profile-steps", type=int, default=30)
    parser.add("--gbit", type=_rate, nargs="+", default=[1.0, 2.5], metavar="RATE")
    parser.add("--mb", type=float, nargs="+", default=[16.0, 4.0], metavar="MB")
    parser.add("--links", nargs="+", default=[], metavar="LINK", help="to run --rows on, as 1gbit")
    parser.add(
        "--rows", nargs="+", default=["ddp:25", "notified"], metavar="ROW", type=one_of(MAKERS)
    )
    parser.add("--rounds", type=int, default=15)
    parser.add("--steps", type=int, default=5)
    add_work(parser)
    return parser


def _rate(text: str) -> float:
    try:
        if 0 < float(text) < float("inf"):
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text} Gbit/s is no rate: give a number above 0")


if __name__ == "__main__":
    run_script(main, lambda work: _serve(Setting(**work)))
