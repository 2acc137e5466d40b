"""Milliseconds to add up 100 MB among machines: Paceline beside Gloo, and the line rate.

    python benchmarks/exchange.py [--quick]

No training: random float32, on 2, 4 and 8 machines with a rank each, and on 2 machines with 2 and
with 4 ranks. A machine is a network namespace, joined to the others by a switch, with a port of
500 Mbit/s both ways; needs root. What each row does is in `exchanges.py`, how it is timed in
`ranks.py`. The ideal is what a plain stream of the bytes that each machine must send and receive
takes in the same rounds; Gloo's best is its row with the smallest median.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from command_line import Options, run_script
from exchanges import ITEM, MAKERS, ideal_bytes
from links import measuring, switch
from ranks import start
from rounds import interleaved, paired_ratio
from table import method_of, one_of, print_table

LINE, GLOO = "line", "gloo"
ROWS = ["gloo", "gloo:8", "gloo:25", "notified", "notified:8"]
WORLDS = ["2", "4", "8", "2x2", "2x4"]
TITLES = ["", "ms", "share of the line rate, 95 %", "its speed / Gloo's best, 95 %"]
WIDTHS = [14, 9, 31, 31]


@dataclass(frozen=True)
class World:
    """Machines, and how many ranks each has."""

    machines: int
    ranks: int

    @classmethod
    def named(cls, text: str) -> World:
        """Read "8", a rank on each of eight machines, or "2x4", four on each of two."""
        numbers = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", text)
        if not numbers or not 2 <= int(numbers[1]) <= 250:
            raise argparse.ArgumentTypeError(
                f"{text!r} is neither a number of machines, 2 to 250, nor MACHINESxRANKS"
            )
        return cls(int(numbers[1]), int(numbers[2] or 1))

    def __str__(self) -> str:
        return f"{self.machines} machines of {self.ranks} rank{'s' * (self.ranks > 1)}"


def main() -> None:
    options = _parser().parse_args()
    if options.quick:
        options.rounds, options.steps = 2, 1
    print(
        f"{options.mb:g} MB of float32, {options.rate} a port; "
        f"{options.rounds} rounds of {options.steps} sums",
        flush=True,
    )
    for world in options.worlds:
        with measuring(world):
            print_world(measure(world, options), world, options)


def measure(world: World, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return each row's milliseconds a sum, a value a round.

    Raises:
        LinkError: the network can't be made here.
    """
    rows = list(dict.fromkeys([LINE, *options.rows]))
    work = {"rows": rows, "numel": _numel(options)}
    program, count = Path(__file__).with_name("exchanges.py"), world.machines * world.ranks
    with (
        switch(options.rate, world.machines) as machines,
        start(machines, program, work, count) as ranks,
    ):
        print(f"\n{world}:", flush=True)
        # A sum is there when the last rank has it; and of a machine's ranks one streams.
        turns = {row: partial(ranks.turn, row, options.steps, over=max) for row in rows}
        return interleaved(turns, options.rounds)


def print_world(
    milliseconds: Mapping[str, list[float]], world: World, options: argparse.Namespace
) -> None:
    """Print the line rate and a line a row."""
    bits = 8 * ideal_bytes(_numel(options), world.machines)
    rate = bits / median(milliseconds[LINE]) / 1e6
    print(f"a plain stream carries {rate:.3g} Gbit/s each way\n")
    of_gloo = [row for row in milliseconds if method_of(row) == GLOO]
    best = min(of_gloo, key=lambda row: median(milliseconds[row]), default="")
    lines = [TITLES]
    for row, values in milliseconds.items():
        share = str(paired_ratio(milliseconds[LINE], values))
        ratio = str(paired_ratio(milliseconds[best], values)) if best and row != LINE else ""
        lines.append([row, f"{median(values):.0f}", share, ratio])
    print_table(lines, WIDTHS, markdown=options.markdown)


def _numel(options: argparse.Namespace) -> int:
    numel: int = round(options.mb * 1e6) // ITEM
    return numel


def _parser() -> Options:
    parser = Options(__doc__, quick="2 rounds of one sum", markdown=True)
    parser.add("--rounds", type=int, default=9)
    parser.add("--steps", type=int, default=3)
    parser.add(
        "--worlds",
        nargs="+",
        default=[World.named(text) for text in WORLDS],
        metavar="MACHINES[xRANKS]",
        type=World.named,
        help=f"default: {' '.join(WORLDS)}",
    )
    parser.add(
        "--rows", nargs="+", default=ROWS, metavar="METHOD[:MB[xCONNECTIONS]]", type=one_of(MAKERS)
    )
    parser.add("--mb", type=float, default=100, help="millions of bytes")
    parser.add("--rate", default="500mbit", help="of a port, as tc knows it")
    return parser


if __name__ == "__main__":
    run_script(main)
