"""Runs with parameter servers in which a process is killed at a random moment, by a seed.

    python -m tests.harness.processes.server_kills [--kinds worker server …] [--modes 0 2]
        [--runs 8] [--seed 0]

Killed is a worker, one of two servers, the only server, the launcher, the meeting place (Redis), in
half of the runs together with a worker soon after, or a server and a worker up to a second later,
when the others may be about to continue. Each run must end, with a ledger that proves
that each sample was trained once, and leave no process. At staleness 0 its weights are those of one
process to 1e-10, and have the bits of a run that resumes an undisturbed one's checkpoint at the
same step with the workers and servers that were left: other cuts of the parameters round otherwise.
The table also has how many steps were trained again.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import Tensor

from paceline.observe.event_file import find_event_files, read_events
from tests.harness.network.redis_server import redis_server
from tests.harness.processes.command import all_end
from tests.harness.processes.fault_runs import (
    EXACT,
    LAST_KILL,
    FaultRun,
    distance,
    load,
    requires_exact,
)

KINDS = ("worker", "server", "only-server", "launcher", "meeting-place", "server-and-worker")
MODES = ("0", "2", "async")
WORKERS = 3
LONGEST_DELAY_S = 0.05  # about a step
RECOVERY_S = 1.0
BUCKETS = ("--bucket_mb", "0.01")
# Below a run's limit: a worker that is killed while Gloo connects delays the others for so long.
_TIMEOUT = ("--timeout", "30")


@dataclass(frozen=True, kw_only=True)
class Kill:
    """What a run does to its processes.

    Attributes:
        kind: what is killed, one of `KINDS`.
        mode: the staleness, as the flag has it.
        step: rank 0 has ended it.
        delays: seconds after that until the kill, and from it to that of the second process.
        victim: number of the worker, or of the server.
        also: a worker that is killed besides; None: none is.
    """

    kind: str
    mode: str
    step: int
    delays: tuple[float, float]
    victim: int
    also: int | None

    @classmethod
    def draw(cls, kind: str, mode: str, seed: int) -> Kill:
        """Draw a moment and a victim."""
        draw = random.Random(f"{kind} {mode} {seed}")
        both = kind == "server-and-worker" or (kind == "meeting-place" and draw.random() < 0.5)
        later = RECOVERY_S if kind == "server-and-worker" else LONGEST_DELAY_S
        return cls(
            kind=kind,
            mode=mode,
            step=draw.randrange(LAST_KILL),
            delays=(draw.uniform(0, LONGEST_DELAY_S), draw.uniform(0, later)),
            victim=draw.randrange(WORKERS if kind == "worker" else 2),
            also=draw.randrange(WORKERS) if both else None,
        )

    @classmethod
    def draw_any(cls, seed: int) -> Kill:
        """Draw a mode and a kind, too, of the kinds that need workers and servers alone."""
        draw = random.Random(seed)
        kind = draw.choice(("worker", "server", "only-server", "server-and-worker"))
        return cls.draw(kind, draw.choice(MODES), seed)

    @property
    def servers(self) -> int:
        """The number of servers at the start."""
        return 1 if self.kind == "only-server" else 2

    @property
    def left(self) -> int:
        """The number of servers that are left, or can still be found."""
        if self.kind == "meeting-place" and self.also is not None:
            return 0
        return self.servers - (self.kind in ("server", "only-server", "server-and-worker"))


@dataclass(frozen=True)
class Outcome:
    """What a kill has come to.

    Attributes:
        repeated: steps that were trained again.
        distance: of the weights from those of one process.
        seconds: of the run.
    """

    repeated: int
    distance: float
    seconds: float


class References:
    """Weights of undisturbed runs.

    Args:
        folder: where they run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._undisturbed: dict[int, FaultRun] = {}

    @cached_property
    def alone(self) -> Mapping[str, Tensor]:
        """Those of one process."""
        return self._train("alone", ("--sync", "allreduce"), 1).weights()

    def undisturbed(self, servers: int) -> FaultRun:
        """Return a run that has a checkpoint of each step, at staleness 0."""
        if servers not in self._undisturbed:
            saving = ("--checkpoint_steps", "1", "--keep_checkpoints", "99")
            words = (*served_by(servers), *saving)
            self._undisturbed[servers] = self._train(f"served-{servers}", words, WORKERS)
        return self._undisturbed[servers]

    def continued(self, servers: int, start: int, workers: int, left: int) -> Mapping[str, Tensor]:
        """Return the weights of a run that continues from a step with the members that are left."""
        resume: tuple[str, ...] = ()
        if start:
            resume = ("--resume", str(self.undisturbed(servers).checkpoint(start)))
        name = f"from-{start}-{servers}-{workers}-{left}"
        if not (self._folder / name).exists():
            self._train(name, (*served_by(left), *resume), workers)
        (path,) = (self._folder / name).glob("runs/r/*_model.pt")
        return load(path)

    def _train(self, name: str, words: Sequence[str], workers: int) -> FaultRun:
        run = FaultRun(self._folder / name, *words, machines=(workers,))
        run.release()
        ended = run.wait()
        assert ended.status == 0, ended.text
        return run


def served_by(servers: int) -> tuple[str, ...]:
    """Return the flags of an exchange with so many servers; without any, the workers own shards."""
    if not servers:
        return "--sync", "notified", "--update", "sharded", *BUCKETS
    return "--sync", "server", "--num_servers", str(servers), *BUCKETS


def check(kill: Kill, folder: Path, references: References) -> Outcome:
    """Make a run with a kill; require what must hold.

    Raises:
        AssertionError: something doesn't hold; has the run's text.
    """
    begin = time.monotonic()
    with ExitStack() as meeting_place:
        store: tuple[str, ...] = ()
        if kill.kind == "meeting-place":
            store = ("--redis_url", meeting_place.enter_context(redis_server()))
        words = (*served_by(kill.servers), "--staleness", kill.mode, *_TIMEOUT, *store)
        run = FaultRun(folder, *words, machines=(WORKERS,))
        run.reach(kill.step)
        processes = [*run.workers(), *run.servers()]
        time.sleep(kill.delays[0])
        _killer(run, kill, meeting_place)()
        if kill.also is not None:
            time.sleep(kill.delays[1])
            run.kill(kill.also)
        run.release()
        ended = run.wait()
    seconds = time.monotonic() - begin
    status = -signal.SIGKILL if kill.kind == "launcher" else 0
    assert ended.status == status, ended.text
    assert "Traceback" not in ended.text, ended.text
    requires_exact(run)
    assert all_end(processes)
    weights = run.weights()
    first, *others = (run.weights_of(rank) for rank in run.completed())
    assert all(distance(first, other) == 0 for other in others)
    if kill.mode == "0":
        assert distance(weights, references.alone) < EXACT
        require_bits(run, kill, references, ended.text)
    return Outcome(repeated_steps(run), distance(weights, references.alone), seconds)


def require_bits(run: FaultRun, kill: Kill, references: References, text: str) -> None:
    """Require the bits of a run without a kill that changes its members at the same step."""
    changes = run.changes()
    if not changes:
        expected = references.undisturbed(kill.servers).weights()
    elif len(changes) == 1:
        workers = WORKERS - len(changes[0].left)
        expected = references.continued(kill.servers, changes[0].start, workers, kill.left)
    else:  # the processes that were killed were lost one after another
        return
    apart = distance(run.weights(), expected)
    assert apart == 0, f"other bits, {apart:.1e} away, {changes}:\n{text}"


def _killer(run: FaultRun, kill: Kill, meeting_place: ExitStack) -> Callable[[], None]:
    kills: Mapping[str, Callable[[], None]] = {
        "worker": lambda: run.kill(kill.victim),
        "server": lambda: run.servers()[kill.victim].kill(),
        "server-and-worker": lambda: run.servers()[kill.victim].kill(),
        "only-server": lambda: run.servers()[0].kill(),
        "launcher": run.kill_supervisor,
        "meeting-place": meeting_place.close,
    }
    return kills[kill.kind]


def repeated_steps(run: FaultRun) -> int:
    """Return how many steps some worker made in a generation that didn't count in the end."""
    made: dict[int, int] = {}  # by generation, the first step that no worker has made
    for _, path in find_event_files(run.run_folder):
        for event in read_events(path):
            if event["event"] == "step":
                generation = event["generation"]
                made[generation] = max(made.get(generation, 0), event["step"] + 1)
    ends = [made[generation] for generation in sorted(made)]
    return sum(max(0, end - start) for end, start in zip(ends, run.starts(), strict=False))


def main() -> int:
    """Make runs, and print a table; return how many didn't hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--modes", nargs="+", default=["0"], help="values of --staleness")
    parser.add_argument("--runs", type=int, default=8, help="of each kind and mode")
    parser.add_argument("--seed", type=int, default=0, help="the first; default: %(default)s")
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        references = References(folder)
        for kind in options.kinds:
            for mode in options.modes:
                failed += _row(kind, mode, options, folder, references)
    return 1 if failed else 0


def _row(
    kind: str, mode: str, options: argparse.Namespace, folder: Path, references: References
) -> int:
    """Make the runs of a kind and a mode, and print their line; return how many didn't hold."""
    held: list[Outcome] = []
    for seed in range(options.seed, options.seed + options.runs):
        kill = Kill.draw(kind, mode, seed)
        try:
            held.append(check(kill, folder / f"{kind}-{mode}-{seed}", references))
        except AssertionError as error:
            print(f"seed {seed}, {kill}: {error}", file=sys.stderr, flush=True)
    failed = options.runs - len(held)
    again = ", ".join(str(one.repeated) for one in held)
    farthest = max((one.distance for one in held), default=0.0)
    longest = max((one.seconds for one in held), default=0.0)
    print(
        f"{kind:17} staleness {mode:6} {len(held)} exact, {failed} failed; steps trained again: "
        f"{again}; from one process: {farthest:.1e}; longest {longest:.0f} s",
        flush=True,
    )
    return failed


if __name__ == "__main__":
    sys.exit(main())
