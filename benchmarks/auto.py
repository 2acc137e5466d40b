"""What `--sync auto` chooses, beside each exchange that it could have chosen, a link at a time.

    python benchmarks/auto.py [--quick]

The work is that of `step.py`. `auto` first runs its trials on the link, alone, and prints its
choice; then its choice and all fixed ones run in turns. It has done well where its time divided
by that of the fastest fixed one isn't above 1 by more than the interval.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from command_line import Options, run_script
from links import LOOPBACK, measuring
from rounds import paired_ratio
from step import measure
from table import print_table
from workloads import add_work, settled

from paceline.wiring.candidates import CANDIDATES, CONNECTIONS

AUTO = "auto"
FIXED = [f"{sync}:{size:g}" for sync, size in CANDIDATES["cpu"]]
FIXED += [f"{row}x{CONNECTIONS}" for row in FIXED if row.startswith("notified")]
TITLES = ["", "ms a step", "auto's time / its, 95 %", "of the fixed"]
WIDTHS = [14, 9, 26, 14]
LINKS = [LOOPBACK, "2.5gbit", "1gbit", "100mbit"]


def main() -> None:
    options = settled(_parser())
    if options.quick:
        options.rounds, options.steps = 2, 1
    for link in options.links:
        with measuring(link):
            milliseconds, rate = measure(link, options)
            print(f"a plain stream carries {rate:.3g} Gbit/s each way\n")
            print_choice(milliseconds, markdown=options.markdown)


def print_choice(milliseconds: Mapping[str, list[float]], *, markdown: bool) -> None:
    """Print a line a row, with what `auto`'s time is of its time."""
    best = min(FIXED, key=lambda row: median(milliseconds[row]))
    lines = [TITLES]
    for row, values in milliseconds.items():
        ratio = str(paired_ratio(milliseconds[AUTO], values))
        lines.append([row, f"{median(values):.0f}", ratio, "fastest" if row == best else ""])
    print_table(lines, WIDTHS, markdown=markdown)


def _parser() -> Options:
    parser = Options(__doc__, quick="2 rounds of one step", markdown=True)
    parser.add("--rounds", type=int, default=15)
    parser.add("--steps", type=int, default=5)
    parser.add("--links", nargs="+", default=LINKS, metavar="LINK")
    add_work(parser)
    parser.set_defaults(rows=[AUTO, *FIXED])
    return parser


if __name__ == "__main__":
    run_script(main)
