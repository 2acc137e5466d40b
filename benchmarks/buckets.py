"""Milliseconds a step by bucket size, a wire at a time, beside DDP at its best bucket.

    python benchmarks/buckets.py [--quick] [--model resnet50|vgg16|lstm|gpt] [--links 1gbit]
        [--wires fp32 bf16 int8] [--sizes 1 2 4 8 16]

The work is that of `step.py`. The *default* is the row of the size that `--sync notified` takes
without `--bucket_mb` on that wire; the best is the row of a size with the smallest median. The
default has done well where its time divided by the best one's isn't above 1 by more than the
interval.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from statistics import median

from command_line import Options, run_script
from links import measuring
from rounds import paired_ratio
from step import DDP, measure
from table import method_of, print_table
from workloads import add_work, settled, title_of

from paceline.config.world import CHOICES, SyncConfig

TITLES = ["", "ms a step", "default's time / its, 95 %", "speed / DDP's best, 95 %", ""]
WIDTHS = [18, 10, 28, 28, 16]


def main() -> None:
    options = settled(_parser())
    if options.quick:
        options.rounds, options.steps = 2, 1
    print(f"{title_of(options)}; {options.rounds} rounds of {options.steps} steps", flush=True)
    for link in options.links:
        with measuring(link):
            _report(link, options)


def _report(link: str, options: argparse.Namespace) -> None:
    for wire in options.wires:
        default = SyncConfig(sync="notified", wire=wire).bucket_bytes / 2**20
        sizes = sorted({*options.sizes, default})
        method = "notified" if wire == "fp32" else f"notified-{wire}"
        options.rows = [f"{DDP}:{mb:g}" for mb in options.ddp]
        options.rows += [f"{method}:{mb:g}" for mb in sizes]
        milliseconds, rate = measure(link, options)
        print(f"{wire}; a plain stream carries {rate:.3g} Gbit/s each way\n")
        print_sizes(milliseconds, f"{method}:{default:g}", markdown=options.markdown)


def print_sizes(milliseconds: Mapping[str, list[float]], default: str, *, markdown: bool) -> None:
    """Print a line a row: what the default's time is of its time, and its speed beside DDP's."""
    ddp = _fastest({r: ms for r, ms in milliseconds.items() if method_of(r) == DDP})
    best = _fastest({r: ms for r, ms in milliseconds.items() if method_of(r) != DDP})
    lines = [TITLES]
    for row, values in milliseconds.items():
        names = [name for name, of in (("default", default), ("best", best)) if of == row]
        lines.append(
            [
                *(row, f"{median(values):.0f}"),
                format(paired_ratio(milliseconds[default], values), ".3f"),
                format(paired_ratio(milliseconds[ddp], values), ".2f"),
                ", ".join(names),
            ]
        )
    print_table(lines, WIDTHS, markdown=markdown)


def _fastest(milliseconds: Mapping[str, list[float]]) -> str:
    return min(milliseconds, key=lambda row: median(milliseconds[row]))


def _parser() -> Options:
    parser = Options(__doc__, quick="2 rounds of one step", markdown=True)
    parser.add("--rounds", type=int, default=15)
    parser.add("--steps", type=int, default=5)
    parser.add("--links", nargs="+", default=["1gbit", "2.5gbit"], metavar="LINK")
    parser.add("--wires", nargs="+", default=CHOICES["wire"], choices=CHOICES["wire"])
    parser.add("--sizes", nargs="+", type=float, default=[1, 2, 4, 8, 16], metavar="MB")
    parser.add("--ddp", nargs="+", type=float, default=[1, 4, 25], metavar="MB")
    add_work(parser)
    return parser


if __name__ == "__main__":
    run_script(main)
