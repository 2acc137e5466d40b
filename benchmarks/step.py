"""Milliseconds a training step: Paceline beside torch's DDP, no exchange, and the floor.

    python benchmarks/step.py [--quick] [--model resnet50|vgg16|lstm|gpt] [--against PATH]

ResNet-50 with 1,000 classes on 64 × 64 random images, 16 a rank, 2 ranks, one thread each, SGD with
Nesterov momentum; over loopback and over links shaped to 2.5 and 1 Gbit/s (which need root). Other
models are in `models.py`, what they train on in `workloads.py`. What each row does is in
`variants.py`, how it is timed in `ranks.py`. All run in turns, so that ratios mean something where
milliseconds don't; DDP's best is its row with the smallest median, a link at a time, and a row's
floor is the one that moves as many bytes. Ratios are of speed: more is better.

With `--against` Paceline's own rows run in turn with those of another checkout, an older one say,
and their ratios are of time: see `against.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from against import (
    NEW,
    OLD,
    Checkout,
    Pairs,
    Until,
    a_checkout,
    compare,
    print_ratios,
    run_checkout,
)
from command_line import Options, run_script
from links import LOOPBACK, connect, measuring
from ranks import start
from rounds import interleaved, paired_ratio
from table import method_of, one_of, print_table
from variants import MAKERS, PACELINE, ring_bytes, wire_of
from workloads import MODELS, add_work, settled, title_of, work_of

PROGRAM = Path(__file__).with_name("variants.py")
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
    parser = _parser()
    options = settled(parser)
    if options.quick:
        options.rounds, options.steps, options.most_rounds = 2, 1, 2
    if options.against is None:
        print(f"{title_of(options)}; {options.rounds} rounds of {options.steps} steps", flush=True)
        for link in options.links:
            with measuring(link):
                _report_speeds(link, options)
        return
    if options.rounds > options.most_rounds:
        parser.error(f"--rounds {options.rounds} is more than --most-rounds {options.most_rounds}")
    with run_checkout(options.against) as old:
        rows = _rows_of_both(parser, options, old)
        print(
            f"{title_of(options)}; {options.rounds} to {options.most_rounds} rounds of "
            f"{options.steps} steps, until an interval's half-width is {options.precision:g}%",
            flush=True,
        )
        for link in options.links:
            with measuring(link):
                _report_ratios(link, options, rows, old)


def measure(link: str, options: argparse.Namespace) -> tuple[dict[str, list[float]], float]:
    """Return each row's milliseconds a step, a value a round, and the line rate in Gbit/s.

    Raises:
        LinkError: the link can't be made here.
    """
    rows = list(dict.fromkeys([*options.rows, LINE]))
    work = _work(options, rows)
    with connect(link) as machines, start(machines, PROGRAM, work, options.ranks) as ranks:
        print(f"\n{link}:", flush=True)
        turns = {row: partial(ranks.turn, row, options.steps) for row in rows}
        milliseconds = interleaved(turns, options.rounds)
        bits = 8 * ring_bytes(options.model, options.ranks)
        return milliseconds, bits / median(milliseconds.pop(LINE)) / 1e6


def measure_against(
    link: str, options: argparse.Namespace, rows: Sequence[str], old: Checkout
) -> dict[str, Pairs]:
    """Return each row's milliseconds a step of this checkout's and of the other's ranks.

    Raises:
        LinkError: the link can't be made here.
    """
    until = Until(
        half_width=options.precision / 100,
        fewest=options.rounds,
        most=options.most_rounds,
        fresh=options.restart_every,
    )
    with connect(link) as machines:
        print(f"\n{link}:\n", flush=True)
        return compare(
            rows,
            {
                NEW: lambda rows: start(machines, PROGRAM, _work(options, rows), options.ranks),
                OLD: lambda rows: old.start(machines, _work(options, rows), options.ranks),
            },
            options.steps,
            until,
        )


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


def _work(options: argparse.Namespace, rows: Sequence[str]) -> dict[str, object]:
    return {**work_of(options), "rows": rows}


def _rows_of_both(
    parser: argparse.ArgumentParser, options: argparse.Namespace, old: Checkout
) -> list[str]:
    if options.model in MODELS and options.model not in old.models:
        parser.error(f"--model {options.model}: {options.against} doesn't have it")
    own = [row for row in options.rows if method_of(row) in PACELINE]
    both = [row for row in own if method_of(row) in old.methods]
    for row in own:
        if row not in both:
            print(f"{row}: not compared, as {options.against} doesn't have it.")
    if not both:
        parser.error("--against compares rows of Paceline that both checkouts have: no such --rows")
    return both


def _report_speeds(link: str, options: argparse.Namespace) -> None:
    milliseconds, rate = measure(link, options)
    print(f"a plain stream carries {rate:.3g} Gbit/s each way\n")
    print_speeds(milliseconds, markdown=options.markdown)


def _report_ratios(
    link: str, options: argparse.Namespace, rows: Sequence[str], old: Checkout
) -> None:
    print_ratios(measure_against(link, options, rows, old), markdown=options.markdown)


def _best(method: str, milliseconds: Mapping[str, list[float]]) -> str:
    rows = [row for row in milliseconds if method_of(row) == method]
    return min(rows, key=lambda row: median(milliseconds[row]), default="")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of rounds: give 1 or more")
    return int(text)


def _parser() -> Options:
    parser = Options(__doc__, quick="2 rounds of one step", markdown=True)
    parser.add("--rounds", type=int, default=15)
    parser.add("--steps", type=int, default=5)
    parser.add("--links", nargs="+", default=LINKS, metavar="LINK")
    parser.add(
        "--rows", nargs="+", default=ROWS, metavar="METHOD[:MB[xCONNECTIONS]]", type=one_of(MAKERS)
    )
    add_work(parser)
    parser.add(
        "--against",
        type=a_checkout,
        metavar="PATH",
        help="another checkout, whose rows of Paceline run in turn with this one's",
    )
    parser.add(
        "--precision",
        type=float,
        default=1,
        metavar="PERCENT",
        help="with --against: add rounds until an interval's half-width is this; "
        "default: %(default)s",
    )
    parser.add("--most-rounds", type=int, default=100, help="with --against")
    parser.add(
        "--restart-every",
        type=_positive,
        default=5,
        metavar="ROUNDS",
        help="with --against: rounds between two starts of the ranks",
    )
    return parser


if __name__ == "__main__":
    run_script(main)
