"""Milliseconds a training step: Paceline beside torch's DDP, no exchange, and the floor.

    python benchmarks/step.py [--quick]

ResNet-50 with 1,000 classes on 64 × 64 random images, 16 a rank, 2 ranks, one thread each, SGD with
Nesterov momentum; over loopback and over links shaped to 2.5 and 1 Gbit/s (which need root). What
each row does is in `variants.py`, how it is timed in `ranks.py`. All run in turns, so that ratios
mean something where milliseconds don't; DDP's best is its row with the smallest median, a link at
a time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from functools import partial
from statistics import median

from links import LOOPBACK, LinkError, connect
from ranks import start
from rounds import interleaved, paired_ratio
from variants import CLASSES, MAKERS, ring_bytes

DDP, FLOOR, LINE = "ddp", "floor", "line"
ROWS = ["none", FLOOR, "ddp:1", "ddp:4", "ddp:25", "allreduce"]
LINKS = [LOOPBACK, "2.5gbit", "1gbit"]
TITLES = ["", "ms a step", "its time / DDP's best, 95 %", "its time / the floor, 95 %"]
WIDTHS = [14, 9, 29, 29]


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
            print_table(milliseconds, markdown=options.markdown)


def measure(link: str, options: argparse.Namespace) -> tuple[dict[str, list[float]], float]:
    """Return each row's milliseconds a step, a value a round, and the line rate in Gbit/s.

    Raises:
        LinkError: the link can't be made here.
    """
    work = {name: getattr(options, name) for name in ("model", "image_size", "batch", "dtype")}
    rows = list(dict.fromkeys([*options.rows, LINE]))
    with connect(link) as machines, start(machines, {**work, "rows": rows}, options.ranks) as ranks:
        print(f"\n{link}:", flush=True)
        turns = {row: partial(ranks.turn, row, options.steps) for row in rows}
        milliseconds = interleaved(turns, options.rounds)
        bits = 8 * ring_bytes(options.model, options.ranks)
        return milliseconds, bits / median(milliseconds.pop(LINE)) / 1e6


def print_table(milliseconds: Mapping[str, list[float]], *, markdown: bool) -> None:
    """Print a line a row, with the ratios to DDP's best row and to the floor."""
    of_ddp = [row for row in milliseconds if row.partition(":")[0] == DDP]
    best = min(of_ddp, key=lambda row: median(milliseconds[row]), default="")
    lines = [TITLES]
    for row, values in milliseconds.items():
        ratios = [
            str(paired_ratio(values, milliseconds[other])) if other in milliseconds else ""
            for other in (best, FLOOR)
        ]
        lines.append([row, f"{median(values):.0f}", *ratios])
    for number, line in enumerate(lines):
        if markdown:
            print(f"| {' | '.join(line)} |" + ("\n|" + " --- |" * len(line)) * (number == 0))
        else:
            cells = zip(line, WIDTHS, strict=True)
            print("".join(f"{c:{w}}" if w == WIDTHS[0] else f"{c:>{w}}" for c, w in cells))
    sys.stdout.flush()


def _row(text: str) -> str:
    """Check a row's name: METHOD or METHOD:MB."""
    method, colon, bucket_mb = text.partition(":")
    if method not in MAKERS:
        raise argparse.ArgumentTypeError(f"{method!r} is none of {', '.join(MAKERS)}")
    if colon and not _is_positive(bucket_mb):
        raise argparse.ArgumentTypeError(f"{bucket_mb} MiB is no size of a bucket")
    return text


def _is_positive(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = partial(parser.add_argument, help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="2 rounds of one step")
    add("--rounds", type=int, default=15)
    add("--steps", type=int, default=5)
    add("--links", nargs="+", default=LINKS, metavar="LINK")
    add("--rows", nargs="+", default=ROWS, metavar="METHOD[:MB]", type=_row)
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
