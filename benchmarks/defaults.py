"""A run with Paceline's defaults from its first steps on, beside DDP's best bucket.

    python benchmarks/defaults.py [--quick] [--model resnet50|vgg16|lstm|gpt] [--links 1gbit]

The work is that of `step.py`. Row `default` has `sync="auto"` in a run of unknown length, as a
script has that gives no options: the exchange that is predicted from its first steps, then trials,
then what they choose. DDP's rows run between, and the best of them is the one with the smallest
sum.

    early    steps 20 to 200 together, trials included
    later    120 steps after those

A ratio is one of sums of times, DDP's best divided by Paceline's, with a 95 % interval by bootstrap
over the rounds. A round's first step isn't timed (see `ranks.py`), in any row. The dependency floor
and the barrier are those of `floor.py`, at the rate that a plain stream reaches on the link.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import mean, median

import numpy as np
from command_line import Options, run_script
from floor import profile_of_work
from links import connect, measuring
from ranks import start
from rounds import Interval, interleaved
from schedules import barrier, floor
from step import PROGRAM
from table import print_table
from variants import ring_bytes
from workloads import add_work, settled, title_of, work_of

DEFAULT, LINE = "default", "line"
DDP = [f"ddp:{mb}" for mb in (1, 4, 25)]
FIRST = 20  # steps before the first round: two at the start, and one that isn't timed, are in it
EARLY, LATER = 9, 6  # rounds
STEPS, DDP_STEPS = 20, 6  # of a round, with the one that isn't timed
TITLES = ["", "ms a step", "speed / DDP's best", "share of the floor", "barrier / floor"]
WIDTHS = [16, 10, 26, 20, 17]


def main() -> None:
    options = settled(parser := _parser())
    if options.ranks < 2:
        parser.error(f"--ranks {options.ranks}: nothing is exchanged; give 2 or more")
    print(title_of(options), flush=True)
    profile = profile_of_work(options)
    for link in options.links:
        with measuring(link):
            parts, gbit = measure(link, options)
            print(f"a plain stream carries {gbit:.3g} Gbit/s each way\n")
            least, slow = floor(profile, options.ranks, gbit), barrier(profile, options.ranks, gbit)
            _print(parts, least, slow, markdown=options.markdown)


def measure(
    link: str, options: argparse.Namespace
) -> tuple[dict[str, dict[str, list[float]]], float]:
    """Return each part's rows with milliseconds a step, a value a round, and the rate in Gbit/s.

    Raises:
        LinkError: the link can't be made here.
    """
    rows = [DEFAULT, *DDP, LINE]
    rounds = {"early": EARLY, "later": LATER}
    steps, ddp_steps = STEPS - 1, DDP_STEPS - 1
    if options.quick:
        rounds, steps, ddp_steps = dict.fromkeys(rounds, 1), 1, 1
    with connect(link) as machines:
        work = work_of(options) | {"rows": rows}
        with start(machines, PROGRAM, work, options.ranks) as ranks:
            print(f"\n{link}:", flush=True)
            ranks.turn(DEFAULT, FIRST - 3)
            bits = 8 * ring_bytes(options.model, options.ranks)
            gbit = bits / median(ranks.turn(LINE, 3) for _ in range(3)) / 1e6
            turns = {DEFAULT: partial(ranks.turn, DEFAULT, steps)}
            turns |= {row: partial(ranks.turn, row, ddp_steps) for row in DDP}
            return {part: interleaved(turns, count) for part, count in rounds.items()}, gbit


def ratio_of_sums(above: Sequence[float], below: Sequence[float]) -> Interval:
    """Divide sums over rounds, with an interval by 10,000 bootstrap samples of the rounds."""
    both = np.array([above, below])
    draws = np.random.default_rng(0).integers(len(above), size=(10_000, len(above)))
    sums = both[:, draws].sum(axis=2)
    low, high = np.percentile(sums[0] / sums[1], [2.5, 97.5]).tolist()
    return Interval(sum(above) / sum(below), low, high)


def _print(
    parts: Mapping[str, Mapping[str, Sequence[float]]], least: float, slow: float, *, markdown: bool
) -> None:
    lines = [TITLES]
    for part, rows in parts.items():
        best = min(DDP, key=lambda row: sum(rows[row]))
        for row in (DEFAULT, best):
            own = mean(rows[row])
            ratio = format(ratio_of_sums(rows[best], rows[row]), ".3f") if row != best else ""
            lines.append(
                [
                    f"{part}: {row}",
                    *(f"{own:.1f}", ratio, f"{1000 * least / own:.3f}", f"{slow / least:.3f}"),
                ]
            )
    print_table(lines, WIDTHS, markdown=markdown)


def _parser() -> Options:
    parser = Options(__doc__, quick="a round of one step for each part", markdown=True)
    parser.add("--links", nargs="+", default=["1gbit", "2.5gbit"], metavar="LINK")
    add_work(parser)
    return parser


if __name__ == "__main__":
    run_script(main)
