r"""Rank processes that hold all variants and run them in turns, by commands.

    parent    "ddp:25 3\n" ──▶ every rank          a row, and how many of its steps to time
              "0.41\n"     ◀── every rank          seconds a step

All variants live in the same processes, so that a round compares them within seconds and nothing
but the exchange differs; those that aren't running wait in the kernel. Their memory (a model and
its momenta, gradients and buckets each) is small.

The steps of a turn are timed in the steady state: one step goes before, untimed, and what the last
one leaves under way is installed after the clock has stopped, since a next step would hide it. So
a method that overlaps the next forward pays for its first forward what it gains in its last.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean

import torch
from links import Machine
from rank_setup import Variant

from paceline.cluster.supervision.allocator import keep_freed_memory

WARM_UP = 1  # step after the first, in which DDP and Paceline learn the order


class Ranks:
    """The parent's side."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        self._processes = processes
        self._hear()  # all is made and warm

    def turn(self, row: str, steps: int, over: Callable[[Iterable[float]], float] = mean) -> float:
        """Run a variant on all ranks; return milliseconds a step, over all ranks.

        Each has a clock of its own, and nothing in a step of Paceline's brings them together: what
        one waits in its first step for another's last one isn't on that one's clock. The largest
        would count such a lag twice; over many turns the mean counts it not at all.
        """
        answers = self.ask(f"{row} {steps}")
        return over(float(answer) for answer in answers) * 1000

    def ask(self, line: str) -> list[str]:
        """Tell all ranks a line; return their answers, a line each."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(line + "\n")
            process.stdin.flush()
        return self._hear()

    def _hear(self) -> list[str]:
        answers = [process.stdout.readline() for process in self._processes if process.stdout]
        if not all(answers):
            raise SystemExit("a rank ended; what it said is above.")
        return answers


@contextmanager
def start(
    machines: Sequence[Machine],
    program: Path,
    work: Mapping[str, object],
    ranks: int,
) -> Iterator[Ranks]:
    """Start ranks, dealt out to the machines in blocks; end them afterwards.

    Args:
        machines: where.
        program: what each of them runs, with its setup and the work as an argument.
        work: more entries of their setup; see `RankSetup`.
        ranks: how many.
    """
    processes: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            on = [machines[rank * len(machines) // ranks] for rank in range(ranks)]
            ranks_by_address = Counter(machine.address for machine in on)
            for rank, machine in enumerate(on):
                setup = {
                    "rank": rank,
                    "ranks": ranks,
                    "address": machine.address,
                    "ranks_by_address": ranks_by_address,
                    "store": str(Path(folder) / "store"),
                    **work,
                }
                processes.append(_start(machine, program, setup))
            yield Ranks(processes)
        finally:
            for process in processes:
                process.kill()
                process.communicate()


def _start(machine: Machine, program: Path, setup: Mapping[str, object]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*machine.enter, sys.executable, str(program), json.dumps(setup)],
        env={**os.environ, "GLOO_SOCKET_IFNAME": machine.interface},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a Ctrl-C is its parent's
    )


def keep_to_own_cores(rank: int, ranks: int) -> None:
    """Run this rank on its share of the cores, as a machine of its own would; later threads too.

    Otherwise the kernel puts the threads that move bytes now on one rank's core, now on another's,
    and the ranks wait for each other in turns. With fewer cores than ranks they share them all.
    """
    cores = sorted(os.sched_getaffinity(0))
    if share := len(cores) // ranks:
        os.sched_setaffinity(0, cores[rank * share : (rank + 1) * share])


def serve(rows: Sequence[str], make: Callable[[str], Variant]) -> None:
    """Be a rank: make all variants, then run what the parent says until it closes its end."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as any worker of Paceline does; the other methods have it too
    commands: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=listen, args=(commands,), daemon=True).start()
    variants = {row: make(row) for row in rows}
    for variant in variants.values():
        timed(variant, WARM_UP)
    print("ready", flush=True)
    while True:
        row, steps = commands.get().split()
        print(timed(variants[row], int(steps)), flush=True)


def listen(commands: queue.SimpleQueue[str]) -> None:
    """Pass the parent's lines on; end with it at once: the others may be out of reach by then."""
    for line in sys.stdin:
        commands.put(line)
    os._exit(0)


def timed(variant: Variant, steps: int) -> float:
    """Return seconds a step in the steady state."""
    variant.step()
    start = time.perf_counter()
    for _ in range(steps):
        variant.step()
    seconds = time.perf_counter() - start
    variant.finish()
    return seconds / steps
