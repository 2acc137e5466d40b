"""Milliseconds a training step: Paceline beside torch's DDP, no exchange, and the floor.

    python benchmarks/step.py [--quick]

ResNet-50 with 1,000 classes on 64 × 64 random images, 16 a rank, 2 ranks, one thread each, SGD with
Nesterov momentum; over loopback and over links shaped to 2.5 and 1 Gbit/s (which need root). What
each row does is in `variants.py`, how it is timed in `ranks.py`. All run in turns, so that ratios
mean something where milliseconds don't; DDP's best is its row with the smallest median, a link at
a time, and a row's floor is the one that moves as many bytes. Ratios are of speed: more is better.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median

from links import LOOPBACK, LinkError, connect
from ranks import start
from rounds import interleaved, paired_ratio
from table import method_of, one_of, print_table
from variants import CLASSES, MAKERS, ring_bytes, wire_of

DDP, LINE = "ddp", "line"
ROWS = [
    *("none", "floor", "floor-bf16", "floor-int8"),
    *("ddp:1", "ddp:4", "ddp:25", "ddp-bf16:1", "ddp-bf16:4", "ddp-bf16:25"),
    *("allreduce", "notified", "notified-sharded", "notified-bf16", "notified-int8"),
]
LINKS = [LOOPBACK, "2.5gbit", "1gbit"]
TITLES = ["", "ms a step", "speed / DDP's best", "/ DDP bf16's best", "/ its floor", "/ none"]
WIDTHS = [14, 9, *[22] * 4]


def main() -> None:
    options = _parser().parse_args()
    if options.quick:
        options.rounds, options.steps = 2, 1
    print(
        f"{options.model}, {CLASSES} classes, {options.image_size} x {options.image_size}, "
        f"{options.batch} images a rank, {options.ranks} ranks, {options.dtype}; "
        f"{options.rounds} rounds of {options.steps} steps",
        flush=True,
    )
    for link in options.links:
        try:
            milliseconds, rate = measure(link, options)
        except LinkError as error:
            print(f"\n{link}: not measured, as {error}.", flush=True)
        else:
            print(f"a plain stream carries {rate:.3g} Gbit/s each way\n")
            print_speeds(milliseconds, markdown=options.markdown)


def measure(link: str, options: argparse.Namespace) -> tuple[dict[str, list[float]], float]:
    """Return each row's milliseconds a step, a value a round, and the line rate in Gbit/s.

    Raises:
        LinkError: the link can't be made here.
    """
    work = {name: getattr(options, name) for name in ("model", "image_size", "batch", "dtype")}
    rows = list(dict.fromkeys([*options.rows, LINE]))
    work["rows"] = rows
    program = Path(__file__).with_name("variants.py")
    with connect(link) as machines, start(machines, program, work, options.ranks) as ranks:
        print(f"\n{link}:", flush=True)
        turns = {row: partial(ranks.turn, row, options.steps) for row in rows}
        milliseconds = interleaved(turns, options.rounds)
        bits = 8 * ring_bytes(options.model, options.ranks)
        return milliseconds, bits / median(milliseconds.pop(LINE)) / 1e6


def print_speeds(milliseconds: Mapping[str, list[float]], *, markdown: bool) -> None:
    """Print a line a row: how many times as fast as the others it is, with 95 % intervals."""
    ddp, ddp_bf16 = _best(DDP, milliseconds), _best(f"{DDP}-bf16", milliseconds)
    lines = [TITLES]
    for row, values in milliseconds.items():
        ratios = [
            str(paired_ratio(milliseconds[other], values)) if other in milliseconds else ""
            for other in (ddp, ddp_bf16, floor_of(row), "none")
        ]
        lines.append([row, f"{median(values):.0f}", *ratios])
    print_table(lines, WIDTHS, markdown=markdown)


def floor_of(row: str) -> str:
    """Return the row of the floor that moves as many bytes as a row does."""
    wire = wire_of(row)
    return "floor" if wire == "fp32" else f"floor-{wire}"


def _best(method: str, milliseconds: Mapping[str, list[float]]) -> str:
    rows = [row for row in milliseconds if method_of(row) == method]
    return min(rows, key=lambda row: median(milliseconds[row]), default="")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = partial(parser.add_argument, help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="2 rounds of one step")
    add("--rounds", type=int, default=15)
    add("--steps", type=int, default=5)
    add("--links", nargs="+", default=LINKS, metavar="LINK")
    add("--rows", nargs="+", default=ROWS, metavar="METHOD[:MB[xCONNECTIONS]]", type=one_of(MAKERS))
    add("--model", default="resnet50")
    add("--image-size", type=int, default=64)
    add("--batch", type=int, default=16, help="images a rank; default: %(default)s")
    add("--ranks", type=int, default=2)
    add("--dtype", choices=["float", "bfloat16"], default="float")
    parser.add_argument("--markdown", action="store_true", help="print tables as markdown")
    return parser


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
