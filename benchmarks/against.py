"""Paceline's rows of two checkouts in turn, and milliseconds a step of the one over the other's.

    round    notified: new, old    notified-int8: new, old    …     the next one: old, new

Each side's ranks are its own checkout's, benchmark and all, and have the same interpreter, torch
and links; only one of them works at a time, the others wait in the kernel. A row has rounds until
its interval is narrow enough.

Two processes of the same code differ by a per cent or two, by their luck with memory. More rounds
don't change that, other processes do: so all ranks are started anew every few rounds, and the two
sides take turns at who is first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from links import Machine
from rounds import paired_ratio, rotated
from table import print_table

NEW, OLD = "new", "old"
TITLES = ["", "new, ms", "old, ms", "new / old, 95 %", "half-width", "rounds"]
WIDTHS = [16, 9, 9, 26, 12, 8]
ENDING = 20  # seconds that another checkout's program has to end its ranks


class Turns(Protocol):
    """Ranks that run what they are told, as `ranks.Ranks` does."""

    def turn(self, row: str, steps: int) -> float:
        """Run a row's steps on all ranks; return milliseconds a step."""
        ...


Start = Callable[[Sequence[str]], AbstractContextManager[Turns]]
"""Starts ranks that have these rows, and ends them."""


Pairs = Mapping[str, list[float]]
"""Milliseconds a step of a row, a value a round: of the new side and of the old one."""


@dataclass(frozen=True, kw_only=True)
class Until:
    """When a row has enough rounds.

    Attributes:
        half_width: of the 95 % interval, as a share of the ratio.
        fewest: rounds before the interval is looked at, as one of a few values means nothing.
        most: rounds after which the row is given up.
        fresh: rounds after which both sides' ranks are started anew.
    """

    half_width: float
    fewest: int
    most: int
    fresh: int

    def has_enough(self, pairs: Pairs) -> bool:
        """Say whether the interval is narrow enough, or there are too many rounds."""
        rounds = len(pairs[NEW])
        if not self.fewest <= rounds < self.most:
            return rounds >= self.most
        return paired_ratio(pairs[NEW], pairs[OLD]).half_width <= self.half_width


def compare(
    rows: Sequence[str], starts: Mapping[str, Start], steps: int, until: Until
) -> dict[str, Pairs]:
    """Run each row on both sides in turn, until it has enough rounds; say how far each row is."""
    results: dict[str, Pairs] = {row: {NEW: [], OLD: []} for row in rows}
    number = 0
    while left := _unfinished(results, until):
        with ExitStack() as stack:
            order = rotated([NEW, OLD], number // until.fresh)
            sides = {side: stack.enter_context(starts[side](left)) for side in order}
            for _ in range(until.fresh):
                for row in _unfinished(results, until):
                    for side in rotated([NEW, OLD], number):
                        results[row][side].append(sides[side].turn(row, steps))
                number += 1
        print(_progress(results), file=sys.stderr, flush=True)
    return results


def print_ratios(results: Mapping[str, Pairs], *, markdown: bool) -> None:
    """Print a line a row: milliseconds of the new side over those of the old one."""
    lines = [TITLES]
    for row, pairs in results.items():
        ratio = paired_ratio(pairs[NEW], pairs[OLD])
        spans = [f"{median(pairs[side]):.1f}" for side in (NEW, OLD)]
        rounds = f"{len(pairs[NEW])}"
        lines.append([row, *spans, f"{ratio:.3f}", f"{ratio.half_width:.1%}", rounds])
    print_table(lines, WIDTHS, markdown=markdown)


def _progress(results: Mapping[str, Pairs]) -> str:
    rows = [
        f"{row} {paired_ratio(pairs[NEW], pairs[OLD]):.3f} after {len(pairs[NEW])} rounds"
        for row, pairs in results.items()
    ]
    return f"new / old: {', '.join(rows)}"


def _unfinished(results: Mapping[str, Pairs], until: Until) -> list[str]:
    return [row for row, pairs in results.items() if not until.has_enough(pairs)]


class Checkout:
    """Another checkout, whose own benchmark runs its ranks; see `checkout.py`.

    Attributes:
        methods: what its rows may name.
        models: the models that it has beside the zoo's.
    """

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self._folder, self._process = folder, process
        said = self._hear()
        if Path(said["package"]).parent != folder:
            raise SystemExit(f"{folder}: its benchmark would measure {said['package']}.")
        self.methods: list[str] = said["methods"]
        self.models: list[str] = said["models"]

    @contextmanager
    def start(
        self, machines: Sequence[Machine], work: Mapping[str, object], ranks: int
    ) -> Iterator[Turns]:
        """Start its ranks; end them afterwards."""
        self._ask(machines=[asdict(machine) for machine in machines], work=work, ranks=ranks)
        yield self
        self._ask()  # after an error the program's end is theirs

    def turn(self, row: str, steps: int) -> float:
        """Run a row's steps on all ranks; return milliseconds a step."""
        return float(self._ask(row=row, steps=steps))

    def _ask(self, **message: object) -> Any:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it ended: its output says so, too
            print(json.dumps(message), file=self._process.stdin, flush=True)
        return self._hear()

    def _hear(self) -> Any:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"{self._folder}: its benchmark ended; what it said is above.")
        return json.loads(line)


@contextmanager
def run_checkout(folder: Path) -> Iterator[Checkout]:
    """Start the program that runs another checkout's ranks; end it and them afterwards."""
    paths = [str(folder / "benchmarks"), str(folder), os.environ.get("PYTHONPATH")]
    process = subprocess.Popen(
        [sys.executable, "-P", str(Path(__file__).with_name("checkout.py"))],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a Ctrl-C is its parent's
    )
    try:
        yield Checkout(folder, process)
    finally:
        process.terminate()
        try:
            process.communicate(timeout=ENDING)
        except subprocess.TimeoutExpired:
            process.kill()  # its ranks end with their input
            process.communicate()


def a_checkout(text: str) -> Path:
    """Return another checkout's folder."""
    folder = Path(text).resolve()
    for needed in ("paceline/__init__.py", "benchmarks/variants.py"):
        if not (folder / needed).is_file():
            raise argparse.ArgumentTypeError(f"{text} is no checkout of Paceline: no {needed}")
    return folder
