"""Runs that take turns at a gate: started together, with their own processes, measured in rounds.

A run waits at the gate of `gpu_models.py` except in its turn. While it waits, its decode processes
fill their ring and then rest. So a turn begins with an untimed part, in which the batches that were
made ahead are used up.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from gpu_jobs import Job, JobFailed, Jobs
from gpu_models import GATE
from gpu_rows import Setting
from rounds import rotated


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A run that takes turns.

    Attributes:
        command: its words.
        batch: images a step.
        untimed: seconds of a turn before those that are timed.
        rest: seconds after a turn, in which its workers make batches ahead and need cores.
        trials: seconds of the first turn, in which a run measures what it chooses from.
        cores: how many it may use; 0: all.
    """

    command: Sequence[str]
    batch: int
    untimed: float = 1.0
    rest: float = 0.0
    trials: float = 0.0
    cores: int = 0


class Turns:
    """Contenders that run, and the failures of those that don't any more.

    Args:
        contenders: by name.
        jobs: in which they are started.
        setting: limits all waits.

    Attributes:
        failures: what happened, by the contender's name.
        jobs: the processes, by the contender's name.
    """

    def __init__(self, contenders: Mapping[str, Contender], jobs: Jobs, setting: Setting) -> None:
        self._contenders, self._setting = contenders, setting
        self.failures: dict[str, JobFailed] = {}
        self.jobs: dict[str, Job] = {}
        self._lines: dict[str, TextIO] = {}
        gates: dict[str, socket.socket] = {}
        for number, (name, contender) in enumerate(contenders.items()):
            gate = jobs.enter_context(socket.socket(socket.AF_UNIX))
            path = str(setting.folder / f"gate{number}")
            gate.bind(path)
            gate.listen()
            gates[name] = gate
            with _cores(contender.cores):
                self.jobs[name] = jobs.start(f"contender{number}", contender.command, {GATE: path})
        for name, gate in gates.items():
            self._accept(name, gate)

    def measure(self, seconds: float, most: int) -> dict[str, list[float]]:
        """Run rounds of turns until the deadline; `seconds` of each turn are timed.

        Returns:
            images a second, a value a round, of the contenders that didn't fail.
        """
        names = [name for name in self._contenders if name in self._lines]
        for name in names:
            if trials := self._contenders[name].trials:
                self._turn(name, trials, 0.0)
                time.sleep(self._contenders[name].rest)
        rates: dict[str, list[float]] = {name: [] for name in names}
        for number in range(most):
            began = time.monotonic()
            for name in rotated(names, number):
                contender = self._contenders[name]
                if name not in self.failures:
                    taken = self._turn(name, contender.untimed, seconds)
                    rates[name].append(contender.batch / taken)
                    time.sleep(contender.rest)
            if self._setting.left < 1.1 * (time.monotonic() - began):
                break
        return {name: found for name, found in rates.items() if name not in self.failures}

    def _accept(self, name: str, gate: socket.socket) -> None:
        """Wait until a run is at its gate: it is up, and has made what its first step needs."""
        gate.settimeout(1.0)
        while True:
            try:
                connection, _ = gate.accept()
            except TimeoutError:
                ended = self.jobs[name].ended
                if not ended and self._setting.left > 0:
                    continue
                what = "ended before its first step" if ended else "was late for its first step"
                self.failures[name] = self.jobs[name].failed(what)
                return
            connection.settimeout(max(self._setting.left, 1.0))
            self._lines[name] = connection.makefile("rw", buffering=1)
            connection.close()  # the file remains
            return

    def _turn(self, name: str, untimed: float, timed: float) -> float:
        """Let a run train for a while; return seconds a step, NaN where it fails."""
        line = self._lines[name]
        try:
            line.write(f"{untimed} {timed}\n")
            answer = line.readline()
        except OSError:
            answer = ""
        if answer:
            return float(answer)
        self.failures[name] = self.jobs[name].failed("ended in its turn, or was late")
        return float("nan")


@contextmanager
def _cores(count: int) -> Iterator[None]:
    """Give processes that the block starts so many cores; 0: as many as this one has."""
    own = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, sorted(own)[:count] if count else own)
        yield
    finally:
        os.sched_setaffinity(0, own)
