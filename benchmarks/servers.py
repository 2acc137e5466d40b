"""How near parameter servers come to a plain stream, beside one on torch's RPC, and DDP.

    python benchmarks/servers.py [--quick]

    worker 0 ─┐              ┌─ server 0        each in a network namespace of its own,
    worker 1 ─┼─ a switch ───┤                  with a port of the same rate both ways
    …        ─┘              └─ server 1

Workers send made-up gradients and compute nothing, so the servers' ports are the bottleneck: each
carries the gradients of all workers in, and as many parameters out. What each row does is in
`server_ranks.py`, how it is timed in `ranks.py`. A row's share is the time of a plain stream of the
same bytes on the same connections, `line`, by its own. At the end, the memory of a server over many
small steps. Needs root.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from links import LinkError, Machine, switch
from ranks import Ranks, start
from rounds import interleaved, median_of, paired_ratio
from server_ranks import LAYER_BYTES, MAKERS, MASTER_PORT, RUN_ID
from table import one_of, print_table

LINE, SERVER = "line", "server"
ROWS = ["server:1", "server", "rpc:1", "rpc", "ddp"]
WORLDS = ["2x1", "4x1", "8x1", "2x2", "4x2", "8x2"]
QUICK_WORLDS = ["2x1"]
RATES = ["200mbit", "1gbit"]
TITLES = ["", "ms", "Gbit/s into a server, and out", "share of the stream, 95 %"]
WIDTHS = [10, 9, 32, 28]
MEMORY_RATE = "10gbit"
MEMORY_LAYERS = 4
SAMPLES = 20
END_S = 30.0
UNITS = {"mbit": 1e6, "gbit": 1e9}


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
    if options.quick:
        options.rounds, options.steps, options.small_steps = 3, 2, 1000
        options.worlds = options.worlds or [World.named(text) for text in QUICK_WORLDS]
    worlds = options.worlds or [World.named(text) for text in WORLDS]
    layers = _layers(options)
    print(
        f"{layers * LAYER_BYTES / 1e6:.1f} MB of gradients a worker; "
        f"{options.rounds} rounds of {options.steps} steps",
        flush=True,
    )
    found: list[dict[str, Any]] = []
    for rate in options.rates:
        for world in worlds:
            try:
                found += measure(world, rate, options)
            except LinkError as error:
                print(f"\n{world}, {rate} a port: not measured, as {error}.", flush=True)
    if options.small_steps:
        try:
            found.append(memory(options))
        except LinkError as error:
            print(f"\nthe memory of a server: not measured, as {error}.", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


def measure(world: World, rate: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one world on one rate, and print its table; return its rows.

    Raises:
        LinkError: the network can't be made here.
    """
    rows = list(dict.fromkeys([LINE, *options.rows]))
    layers = _layers(options)
    milliseconds: dict[str, list[float]] = {LINE: []}
    with switch(rate, world.workers + world.servers) as machines:
        print(f"\n{world}, {rate} a port:", flush=True)
        with _started(world, machines, rows, layers) as (ranks, _):
            turns = {row: partial(ranks.turn, row, options.steps, over=max) for row in rows}
            milliseconds = interleaved(turns, options.rounds)
    _print_world(milliseconds, world, layers, options)
    return _rows(milliseconds, world, rate, layers)


@contextmanager
def _started(
    world: World, machines: Sequence[Machine], rows: Sequence[str], layers: int
) -> Iterator[tuple[Ranks, Sequence[subprocess.Popen[bytes]]]]:
    """Start the servers of Paceline and the ranks; end them afterwards.

    Each binding of a row is one of a run of its own to `paceline serve`: the rows share a world, so
    that one row of `server` at most is in a start.
    """
    program = Path(__file__).with_name("server_ranks.py")
    work = {
        "rows": rows,
        "workers": world.workers,
        "master": machines[0].address,
        "layers": layers,
    }
    with (
        _serving(machines[0].address, machines[world.workers :]) as servers,
        start(machines, program, work, len(machines)) as ranks,
    ):
        yield ranks, servers


@contextmanager
def _serving(
    master: str, machines: Sequence[Machine]
) -> Iterator[Sequence[subprocess.Popen[bytes]]]:
    """Start `paceline serve` on each of these machines; end it afterwards."""
    meet = ("--run_id", RUN_ID, "--master", f"{master}:{MASTER_PORT}")
    command = (sys.executable, "-m", "paceline.cli.main", "serve", *meet)
    servers = [
        subprocess.Popen(
            [*machine.enter, *command],
            stdout=subprocess.DEVNULL,
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


def _rows(
    milliseconds: Mapping[str, list[float]], world: World, rate: str, layers: int
) -> list[dict[str, Any]]:
    """Return what was measured of each row, for --json."""
    return [
        {
            "workers": world.workers,
            "servers": world.servers,
            "rate": rate,
            "row": row,
            "milliseconds": values,
            "gbit": _gbit(median(values), world, layers),
            "share": paired_ratio(milliseconds[LINE], values).median,
        }
        for row, values in milliseconds.items()
    ]


def _print_world(
    milliseconds: Mapping[str, list[float]], world: World, layers: int, options: argparse.Namespace
) -> None:
    lines = [TITLES]
    for row, values in milliseconds.items():
        rate = "" if row.startswith("ddp") else f"{_gbit(median(values), world, layers):.3f}"
        share = str(paired_ratio(milliseconds[LINE], values))
        lines.append([row, f"{median(values):.0f}", rate, share])
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
    later = [after - before for before, after in pairwise(kib[SAMPLES // 10 :])]
    print(f"\na server of 2 workers, {SAMPLES * part:,} steps of {MEMORY_LAYERS} buckets' layers:")
    print(f"MiB after every {part:,} steps: {' '.join(f'{one / 1024:.1f}' for one in kib)}")
    growth = 1000 * sum(later) / (part * len(later))
    print(f"growth after the first tenth: {growth:.1f} KiB in 1,000 steps", flush=True)
    return {"row": "memory", "steps": part, "kib": kib, "growth": growth}


def _layers(options: argparse.Namespace) -> int:
    """Return the number of layers, the same number for each server."""
    return max(2, round(options.mb * 1e6 / LAYER_BYTES / 2) * 2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = partial(parser.add_argument, help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="one world, 3 rounds of 2 steps")
    add("--rounds", type=int, default=7)
    add("--steps", type=int, default=4)
    add("--small_steps", type=int, default=10_000)
    parser.add_argument(
        "--worlds",
        nargs="+",
        metavar="WORKERSxSERVERS",
        type=World.named,
        help=f"default: {' '.join(WORLDS)}; with --quick {' '.join(QUICK_WORLDS)}",
    )
    add("--rates", nargs="+", default=RATES, help="of a port, as tc knows it; default: %(default)s")
    add("--rows", nargs="+", default=ROWS, metavar="METHOD[:MB]", type=one_of(MAKERS))
    add("--mb", type=float, default=25, help="millions of bytes a worker; default: %(default)s")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--markdown", action="store_true", help="print tables as markdown")
    return parser


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
