"""How near parameter servers come to a plain stream, beside one on torch's RPC, and DDP.

    python benchmarks/servers.py [--quick]

    worker 0 ─┐              ┌─ server 0        each in a network namespace of its own,
    worker 1 ─┼─ a switch ───┤                  with a port of the same rate both ways
    …        ─┘              └─ server 1

Workers send made-up gradients and compute nothing, so the servers' ports are the bottleneck: each
carries the gradients of all workers in, and as many parameters out. What each row does is in
`server_ranks.py`, how it is timed in `ranks.py`. A row's share is the time of a plain stream of the
same bytes on the same connections, `line`, by its own; DDP has no server, and fewer bytes at each
port with few workers. A process has one world of Paceline, so each
of its rows is in a start of its own, with `line` beside it. At the end, the memory of a server over
many small steps. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from command_line import Options, run_script
from links import Machine, measuring, switch
from ranks import Ranks, start
from rounds import Interval, interleaved, paired_ratio
from server_ranks import LAYER_BYTES, MAKERS, MASTER_PORT, RUN_ID, steps_of
from table import method_of, one_of, print_table

LINE = "line"
SERVER = "server"
RPC = "rpc"
ROWS = ["server", "server:4", "server-2", "server-async", "rpc", "ddp"]
QUICK_ROWS = ["server", "rpc", "ddp"]
WORLDS = ["2x1", "4x1", "8x1", "2x2", "4x2", "8x2"]
QUICK_WORLDS = ["2x1"]
RATES = ["200mbit", "1gbit"]
TITLES = ["", "ms", "Gbit/s into a server, and out", "stream's time / its, 95 %"]
WIDTHS = [10, 9, 32, 28]
MEMORY_RATE = "10gbit"
MEMORY_LAYERS = 4
SAMPLES = 20


@dataclass(frozen=True)
class World:
    """Workers and servers, on a machine each."""

    workers: int
    servers: int

    @classmethod
    def named(cls, text: str) -> World:
        """Read "8x2": eight workers and two servers."""
        numbers = re.fullmatch(r"([1-9]\d?)x([1-9])", text)
        if not numbers or int(numbers[1]) < 2:
            raise argparse.ArgumentTypeError(
                f"{text!r} isn't WORKERSxSERVERS, with 2 to 99 workers and 1 to 9 servers"
            )
        return cls(int(numbers[1]), int(numbers[2]))

    def __str__(self) -> str:
        return f"{self.workers} workers, {self.servers} server{'s' * (self.servers > 1)}"


def main() -> None:
    options = _parser().parse_args()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the namespaces have no names of hosts
    if options.quick:
        options.rounds = 2
        options.steps = 1
        options.small_steps = min(1000, options.small_steps)
        options.mb = min(25, options.mb)
    named = QUICK_WORLDS if options.quick else WORLDS
    worlds = options.worlds or [World.named(text) for text in named]
    options.rows = options.rows or (QUICK_ROWS if options.quick else ROWS)
    layers = _layers(options)
    print(
        f"{layers * LAYER_BYTES / 1e6:.1f} MB of gradients a worker; "
        f"{options.rounds} rounds of {options.steps} steps",
        flush=True,
    )
    found: list[dict[str, Any]] = []
    for rate in options.rates:
        for world in worlds:
            with measuring(f"{world}, {rate} a port"):
                found += measure(world, rate, options)
    if options.small_steps:
        with measuring("the memory of a server"):
            found.append(memory(options))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def measure(world: World, rate: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one world at one rate, and print its table; return its rows.

    Raises:
        LinkError: the network can't be made here.
    """
    layers = _layers(options)
    found: list[dict[str, Any]] = []
    with switch(rate, world.workers + world.servers) as machines:
        print(f"\n{world}, {rate} a port:", flush=True)
        for rows in starts(options.rows):
            with _started(world, machines, rows, layers) as (ranks, _):
                turns = {row: partial(ranks.turn, row, options.steps, over=max) for row in rows}
                turned = interleaved(turns, options.rounds)
            milliseconds = {
                row: [value / steps_of(row) for value in values] for row, values in turned.items()
            }
            found += _results(milliseconds, world, rate, layers)
    _print_world(found, options)
    return found


def starts(rows: Sequence[str]) -> list[list[str]]:
    """Deal rows out to starts of the processes, each with the plain stream.

    A process joins one world of Paceline and one of torch's RPC.
    """
    dealt: list[list[str]] = []
    for row in rows:
        alone = {SERVER, RPC}.intersection([kind_of(row)])
        for start_rows in dealt:
            if not alone.intersection(map(kind_of, start_rows)):
                start_rows.append(row)
                break
        else:
            dealt.append([LINE, row])
    return dealt


def kind_of(row: str) -> str:
    """Return "server" for all rows of Paceline's servers, the method for others."""
    return method_of(row).partition("-")[0]


@contextmanager
def _started(
    world: World, machines: Sequence[Machine], rows: Sequence[str], layers: int
) -> Iterator[tuple[Ranks, Sequence[subprocess.Popen[bytes]]]]:
    """Start Paceline's servers, if a row needs them, and the ranks; end them afterwards."""
    program = Path(__file__).with_name("server_ranks.py")
    work = {
        "rows": rows,
        "workers": world.workers,
        "master": machines[0].address,
        "layers": layers,
    }
    served = machines[world.workers :] if SERVER in map(kind_of, rows) else ()
    with (
        _serving(machines[0].address, served) as servers,
        start(machines, program, work, len(machines)) as ranks,
    ):
        yield ranks, servers


@contextmanager
def _serving(
    master: str, machines: Sequence[Machine]
) -> Iterator[Sequence[subprocess.Popen[bytes]]]:
    """Start `paceline serve` on each of these machines; end it afterwards."""
    meet = ("--run_id", RUN_ID, "--master", f"{master}:{MASTER_PORT}")
    limits = ("--first_iter_timeout", "300")
    command = (sys.executable, "-m", "paceline.cli.main", "serve", *meet, *limits)
    servers = [
        subprocess.Popen(
            [*machine.enter, *command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # what a server refuses or loses, the workers say too
            start_new_session=True,
        )
        for machine in machines
    ]
    try:
        yield servers
    finally:
        for process in servers:
            process.kill()
            process.wait()


def _results(
    milliseconds: Mapping[str, list[float]], world: World, rate: str, layers: int
) -> list[dict[str, Any]]:
    """Return what was measured of each row, for the table and --json."""
    return [
        {
            "workers": world.workers,
            "servers": world.servers,
            "rate": rate,
            "row": row,
            "milliseconds": values,
            "gbit": None if row.startswith("ddp") else _gbit(median(values), world, layers),
            "share": vars(paired_ratio(milliseconds[LINE], values)),
        }
        for row, values in milliseconds.items()
    ]


def _print_world(found: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> None:
    lines = [TITLES]
    for result in found:
        rate = "" if result["gbit"] is None else f"{result['gbit']:.3f}"
        share = str(Interval(**result["share"]))
        lines.append([result["row"], f"{median(result['milliseconds']):.0f}", rate, share])
    print_table(lines, WIDTHS, markdown=options.markdown)


def _gbit(milliseconds: float, world: World, layers: int) -> float:
    """Return the rate of what goes into each server, which is that of what goes out."""
    return 8 * world.workers * layers * LAYER_BYTES / world.servers / milliseconds / 1e6


def memory(options: argparse.Namespace) -> dict[str, Any]:
    """Print the memory of a server over many small steps of two workers.

    Raises:
        LinkError: the network can't be made here.
    """
    world = World(2, 1)
    part = max(1, options.small_steps // SAMPLES)
    with (
        switch(MEMORY_RATE, 3) as machines,
        _started(world, machines, [SERVER], MEMORY_LAYERS) as (ranks, servers),
    ):
        process = psutil.Process(servers[0].pid)
        kib = []
        for _ in range(SAMPLES):
            ranks.turn(SERVER, part, over=max)
            kib.append(process.memory_info().rss // 1024)
    warm = SAMPLES // 4
    growth = 1000 * (kib[-1] - kib[warm]) / (part * (SAMPLES - 1 - warm))
    mb = MEMORY_LAYERS * LAYER_BYTES / 1e6
    print(f"\na server of 2 workers, {SAMPLES * part:,} steps of {mb:.1f} MB:")
    print(f"MiB after every {part:,} steps: {' '.join(f'{one / 1024:.1f}' for one in kib)}")
    print(f"growth after the first {warm * part:,}: {growth:.1f} KiB in 1,000 steps", flush=True)
    return {"row": "memory", "steps": part, "kib": kib, "growth": growth}


def _layers(options: argparse.Namespace) -> int:
    """Return the number of layers, the same number for each server."""
    return max(2, round(options.mb * 1e6 / LAYER_BYTES / 2) * 2)


def _parser() -> Options:
    parser = Options(__doc__, quick="one world, 2 rounds of a step", markdown=True, figures=True)
    parser.add("--rounds", type=int, default=3)
    parser.add("--steps", type=int, default=2)
    parser.add("--small_steps", type=int, default=10_000)
    parser.add(
        "--worlds",
        nargs="+",
        metavar="WORKERSxSERVERS",
        type=World.named,
        help=f"default: {' '.join(WORLDS)}; with --quick {' '.join(QUICK_WORLDS)}",
    )
    parser.add("--rates", nargs="*", default=RATES, help="of a port, as tc knows it")
    parser.add(
        "--rows",
        nargs="+",
        metavar="METHOD[:MB]",
        type=one_of(MAKERS),
        help=f"default: {' '.join(ROWS)}; with --quick {' '.join(QUICK_ROWS)}",
    )
    parser.add("--mb", type=float, default=50, help="millions of bytes a worker")
    return parser


if __name__ == "__main__":
    run_script(main)
