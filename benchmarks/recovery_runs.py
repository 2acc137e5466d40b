"""Runs whose workers are killed one after another, by Paceline and by torchrun.

    start ── steps ── kill ── the lost step begins again ── steps ── kill ── …

The moment of a kill is noted by the monotonic clock of the machine, which all its processes share.
What the survivors note in their files is compared with it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from children import kill_tree

LIMIT = 60.0  # seconds for a start, for a recovery; what takes longer has failed
LOOK = 0.02  # seconds between two looks at the files
WORKERS = 4
WORK = {"resnet20": (64, 32, 10), "resnet50": (16, 64, 1000)}  # batch, image size, labels
HERE = Path(__file__).parent
# torch 2.13 gives restarted workers the store of the ones before, with their addresses: all fail.
VARIABLES = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
PARTS = ("detect", "interrupt", "decide", "restore", "form", "resume")


class RunFailed(Exception):
    """Exception of a run that didn't continue as it ought to."""


@dataclass(frozen=True)
class Moment:
    """Moment of a kill.

    Attributes:
        steps: that all workers complete before, in this generation.
        part: of the next step, 0 to 1.
        victim: which of the present ranks is killed, 0 to 1.
    """

    steps: int
    part: float
    victim: float


def moments(number: int) -> list[Moment]:
    """Return the moments of a run's kills, the same for all contenders."""
    draw = random.Random(number)
    first = [Moment(draw.randint(30, 45), draw.random(), draw.random())]
    return first + [
        Moment(draw.randint(3, 8), draw.random(), draw.random()) for _ in range(WORKERS - 2)
    ]


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What a kill cost, in seconds.

    Attributes:
        resumed: from the kill until each worker has begun a step.
        replayed: from the kill until each worker has begun the step that was lost.
        interval: steps between two snapshots, or checkpoints.
        steps: the number of steps that were trained again.
        parts: of `resumed`, by name, where they are known: of the last worker.
    """

    resumed: float
    replayed: float
    interval: int
    steps: int
    parts: Mapping[str, float]


class KilledRun(Protocol):
    """A run, whose workers are killed."""

    def ranks(self) -> list[int]:
        """Return the processes of the present generation, by rank; wait for its first step."""

    def completed(self) -> int:
        """Return how many steps of this generation all its workers have begun."""

    def recovery(self, killed_at: float) -> Recovery:
        """Wait until a kill is recovered from, and enter the next generation."""


def kill_workers(run: KilledRun, schedule: Sequence[Moment]) -> Iterator[Recovery]:
    """Kill workers of a run at given moments; yield what each kill cost."""
    for moment in schedule:
        ranks, times = run.ranks(), [time.monotonic()]
        for steps in range(1, moment.steps + 1):
            wait_until(lambda steps=steps: run.completed() >= steps, "the next step")
            times.append(time.monotonic())
        lasted = median(after - before for before, after in pairwise(times))
        time.sleep(moment.part * lasted)
        killed_at = time.monotonic()
        os.kill(ranks[int(moment.victim * len(ranks))], signal.SIGKILL)
        yield run.recovery(killed_at)


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Look until a condition holds.

    Raises:
        RunFailed: it doesn't hold within the limit.
    """
    end = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > end:
            raise RunFailed(f"no sign of {what} within {LIMIT:g} s")
        time.sleep(LOOK)


class Lines:
    """Reader of a file of JSON lines that another process appends to."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0
        self.all: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """Return all complete lines up to now."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._at)
                for line in file:
                    if line.endswith(b"\n"):
                        self._at += len(line)
                        self.all.append(json.loads(line))
        return self.all


@contextmanager
def started(command: Sequence[str], folder: Path) -> Iterator[None]:
    """Start a launcher, whose processes are all killed in the end."""
    with (folder / "output").open("wb") as output:
        variables = {**os.environ, **VARIABLES}
        process = subprocess.Popen(
            command, stdout=output, stderr=output, cwd=folder, env=variables, start_new_session=True
        )
    try:
        yield
    except RunFailed as error:
        text = (folder / "output").read_text(errors="replace")
        raise RunFailed(f"{error}; it printed:\n{text[-3000:]}") from None
    finally:
        kill_tree(process)


class PacelineRun:
    """A run of `paceline train`.

    Args:
        folder: where it runs.
    """

    def __init__(self, folder: Path) -> None:
        self._run = folder / "runs" / "r"
        self._number = 0  # of the generation
        self._members: list[str] = []
        self._files: dict[str, Lines] = {}

    @staticmethod
    def command(model: str, sync: str) -> list[str]:
        """Return the command."""
        batch, size, labels = WORK[model]
        return [
            *(sys.executable, "-m", "paceline.cli.main", "train", "--train_data", "null"),
            *("--augment", "none", "--model", model, "--sync", sync),
            *("--image_size", str(size), "--batch_size", str(batch), "--num_labels", str(labels)),
            *("--num_workers", str(WORKERS), "--run_id", "r", "--decode_workers", "0"),
            *("--base_learning_rate", "0.01"),
        ]

    def ranks(self) -> list[int]:
        """Return the processes of the present generation, by rank; wait for its first step."""
        if not self._members:
            wait_until(self._find_members, "a first step")
        records = [self._run / "members" / f"{member}.json" for member in self._members]
        return [json.loads(path.read_text())["process"]["pid"] for path in records]

    def completed(self) -> int:
        """Return how many steps of this generation all its workers have completed."""
        return min(len(self._events(member, "step")) for member in self._members)

    def recovery(self, killed_at: float) -> Recovery:
        """Wait until a kill is recovered from, and enter the next generation."""
        self._number += 1
        before = len(self._members)
        wait_until(lambda: any(self._changes()), "the next generation")
        (self._members,) = {tuple(one["members"]) for one in self._changes()}
        if len(self._members) != before - 1:
            raise RunFailed(f"{before - len(self._members)} workers were lost by one kill")
        wait_until(
            lambda: all(self._events(member, "replay") for member in self._members),
            "the step that was lost",
        )
        found = []
        for member in self._members:
            (took,), (replay,) = self._events(member, "recovery"), self._events(member, "replay")
            detect = {"detect": took["detected_at"] - killed_at}
            parts = {**detect, **{name: {**took, **replay}[name] for name in PARTS[1:]}}
            resumed = sum(parts.values())
            found.append(
                Recovery(
                    resumed=resumed,
                    replayed=resumed + replay["replay"],
                    interval=took["interval"],
                    steps=took["steps"],
                    parts=parts,
                )
            )
        return max(found, key=lambda one: one.resumed)

    def _find_members(self) -> bool:
        paths = sorted(self._run.glob("events.*.jsonl"))
        self._files = {path.name[len("events.") : -len(".jsonl")]: Lines(path) for path in paths}
        starts = [one for lines in self._files.values() for one in lines.read()]
        members = next((one["members"] for one in starts if one["event"] == "run"), [])
        records = [self._run / "members" / f"{member}.json" for member in members]
        if members and set(members) == self._files.keys() and all(p.exists() for p in records):
            self._members = members
        return bool(self._members) and self.completed() > 0

    def _changes(self) -> list[dict[str, Any]]:
        return [one for member in self._members for one in self._events(member, "change")]

    def _events(self, member: str, kind: str) -> list[dict[str, Any]]:
        return [
            event
            for event in self._files[member].read()
            if event["event"] == kind and event["generation"] == self._number
        ]


class TorchrunRun:
    """A run of torchrun, which restarts all workers after a kill.

    Args:
        folder: where it runs.
        interval: steps between two checkpoints.
    """

    def __init__(self, folder: Path, interval: int) -> None:
        self._folder, self._interval, self._restart = folder, interval, 0
        self._open()

    @staticmethod
    def command(model: str, folder: Path, interval: int) -> list[str]:
        """Return the command."""
        batch, size, labels = WORK[model]
        return [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(WORKERS), "--max-restarts", str(WORKERS - 1)),
            *(str(HERE / "recovery_ddp.py"), "--folder", str(folder), "--every", str(interval)),
            *("--model", model, "--image-size", str(size), "--labels", str(labels)),
            *("--batch", str(batch)),
        ]

    def ranks(self) -> list[int]:
        """Return the workers' processes, by rank; wait for their first step."""
        wait_until(self.completed, "a first step")
        return [lines.all[0]["pid"] for lines in self._files]

    def completed(self) -> int:
        """Return how many steps all workers have completed since the last restart."""
        return max(0, min(len(lines.read()) for lines in self._files) - 1)

    def recovery(self, killed_at: float) -> Recovery:
        """Wait until all workers are restarted, and train the step that was lost."""
        lost = max(line["step"] for lines in self._files for line in lines.read())
        self._restart += 1
        self._open()
        wait_until(lambda: all(self._step(lines, lost) for lines in self._files), "a restart")
        first = [lines.all[0] for lines in self._files]
        return Recovery(
            resumed=max(line["at"] for line in first) - killed_at,
            replayed=max(self._step(lines, lost)[0]["at"] for lines in self._files) - killed_at,
            interval=self._interval,
            steps=lost - first[0]["step"],
            parts={},
        )

    def _open(self) -> None:
        self._files = [
            Lines(self._folder / f"steps.{self._restart}.{rank}.jsonl") for rank in range(WORKERS)
        ]

    def _step(self, lines: Lines, number: int) -> list[dict[str, Any]]:
        return [line for line in lines.read() if line["step"] == number]
