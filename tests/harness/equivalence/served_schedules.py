"""Random schedules of workers and parameter servers that are threads, with deaths; NumPy judges.

    python -m tests.harness.equivalence.served_schedules [--count 1000] [--seed 0]

A schedule draws numbers of workers, servers and steps, the staleness or asynchronous updates, late
puts that overtake each other, and which worker waits, before it makes a step, until which other one
has begun a later step. So the order of the steps is drawn, and nothing sleeps. In half of the
schedules a worker or a server dies, at a drawn put of all that it makes. The others lose it within
the limit, and continue in a new exchange from the newest snapshot that all members had:

    workers 0 1 2, server 0 1     snapshot ── steps ── snapshot ── steps ── worker 1 dies
    workers 0 1, servers 0 1                           └─▶ the same batches, cut anew ── … ── end

The models in NumPy (`served_models.py`) get what each worker has read, or the order of pushes at
each server. Each must have the parameters of each snapshot that counts, to 1e-10: so each push of
a step that counts is in them once, and none of another step.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import os
import random
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from paceline.algorithms.synchronizer import Weights
from paceline.comm.communicator import Communicator
from paceline.errors import CommError, CommTimeout, PeerLost
from paceline.reduce.rank_state import restore_parts
from paceline.state.state_copy import copy_state
from tests.harness.equivalence.large_batch import replicate
from tests.harness.equivalence.served_synchronizers import Served
from tests.harness.equivalence.steps_by_hand import replica_step
from tests.harness.reference.served_models import (
    DECAY,
    MOMENTUM,
    RATE,
    AsynchronousModel,
    Batch,
    Places,
    Push,
    StaleModel,
    Trained,
)
from tests.harness.twins.communicator import ThreadGroup
from tests.harness.twins.mortal_window import Mortal

LIMIT = 60.0  # seconds of a wait, and of a whole schedule
EXACT = 1e-10


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Schedule of a run.

    Attributes:
        seed: of what is drawn.
        workers, servers, steps: of the run.
        staleness: None: asynchronous.
        scales_rate: as of `ParameterServer`.
        bucket_bytes: size of a bucket.
        late: puts are late and overtake each other.
        gates: for a worker and its step: another worker, and the step that it must have begun.
        snapshots: steps before which all workers have a snapshot.
        batches: the samples of each step.
        deaths: the number of generations in which members die.
    """

    seed: int
    workers: int
    servers: int
    steps: int
    staleness: int | None
    scales_rate: bool
    bucket_bytes: int
    late: bool
    gates: Mapping[tuple[int, int], tuple[int, int]]
    snapshots: frozenset[int]
    batches: Sequence[Batch]
    deaths: int

    @classmethod
    def draw(cls, seed: int, *, disturbed: bool | None = None) -> Schedule:
        """Draw a schedule in which some worker is to lead by all of the staleness.

        In each block of steps, the others wait for one worker alone, and for steps of the block. It
        needs of them what they have made before, so that none waits for itself.
        """
        draw = random.Random(seed)
        workers = draw.randint(2, 4)
        staleness = draw.choice([0, 1, 2, 3, 1, 2, 3, None, None])
        ahead = draw.randint(1, 3) if staleness is None else staleness
        blocks = draw.randint(2, 3)
        length = ahead + draw.randint(1, 3)
        gates = {}
        for block in range(blocks):
            first, end = block * length, (block + 1) * length
            fastest, *slower = draw.sample(range(workers), workers)
            gates[slower[-1], first] = fastest, first + ahead
            for worker in slower:
                for step in range(first, end):
                    lead = draw.randint(0, ahead)
                    if draw.random() < 0.5 and step + lead < end:
                        gates.setdefault((worker, step), (fastest, step + lead))
        steps = blocks * length
        if disturbed is None:
            disturbed = draw.random() < 0.5
        numbers = np.random.default_rng(seed)
        sizes = [draw.randint(4, 12) for _ in range(steps)]
        return cls(
            seed=seed,
            workers=workers,
            servers=draw.randint(1, 3),
            steps=steps,
            staleness=staleness,
            scales_rate=staleness is None and draw.random() < 0.5,
            bucket_bytes=draw.choice([1, 100, 10**9]),
            late=draw.random() < 0.5,
            gates=gates,
            snapshots=frozenset(b * length for b in range(1, blocks) if draw.random() < 0.7),
            batches=[(numbers.normal(size=(n, 6)), numbers.normal(size=(n, 3))) for n in sizes],
            deaths=draw.randint(1, 2) if disturbed else 0,
        )

    def slices(self, step: int, workers: int) -> list[Batch]:
        """Cut a batch into unequal slices, one a worker, of at least one sample each."""
        x, y = self.batches[step]
        draw = random.Random(f"{self.seed} {step} {workers}")
        cuts = [0, *sorted(draw.sample(range(1, len(x)), workers - 1)), len(x)]
        return [(x[a:b], y[a:b]) for a, b in pairwise(cuts)]

    def mortals(self, number: int, workers: int, servers: int) -> dict[tuple[str, int], Mortal]:
        """Make the members of a generation; draw which ones die, and after how many puts."""
        draw = random.Random(f"{self.seed} deaths {number}")
        puts: dict[tuple[str, int], int] = {}
        if number < self.deaths:
            kinds = [kind for kind, n in (("worker", workers), ("server", servers)) if n > 1]
            chosen = draw.sample(kinds, draw.choice([1, 1, 1, len(kinds)]) if kinds else 0)
            counts = {"worker": workers, "server": servers}
            for kind in chosen:
                victim = kind, draw.randrange(counts[kind])
                puts[victim] = draw.randint(1, 4 + 3 * self.steps)
        members = [("worker", n) for n in range(workers)] + [("server", n) for n in range(servers)]
        return {member: Mortal(puts.get(member)) for member in members}


class Progress:
    """What the workers of a generation have begun and read so far.

    Args:
        workers: their number.
        first: the first step.

    Attributes:
        lead: the largest one so far.
        reads: by worker and step, the version of each parameter that it read.
    """

    def __init__(self, workers: int, first: int) -> None:
        self.lead = 0
        self.reads: dict[tuple[int, int], dict[str, int]] = {}
        self._begun = dict.fromkeys(range(workers), first - 1)
        self._trained = dict.fromkeys(range(workers), first)  # steps it may have sent
        self._ended = False
        self._changed = threading.Condition()

    def await_begun(self, worker: int, step: int) -> None:
        """Wait until a worker has begun a step; raise PeerLost if the generation ends before."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._ended or self._begun[worker] >= step, LIMIT)
            if self._ended:
                raise PeerLost(cause="the generation has ended", operation="a gate")

    def begin(self, worker: int, step: int, read: dict[str, int]) -> None:
        """Note that a worker has read the parameters of a step, and may send its gradients."""
        with self._changed:
            self._begun[worker] = step
            self.reads[worker, step] = read
            self.lead = max(self.lead, step - min(self._trained.values()))
            self._trained[worker] = step + 1
            self._changed.notify_all()

    def beyond(self, step: int) -> int:
        """Return how many steps some worker has begun from a step on."""
        return max(0, max(self._begun.values()) + 1 - step)

    def end(self) -> None:
        """End all waits."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()


@dataclass
class Snapshot:
    """Snapshot of all workers before a step.

    Attributes:
        step: the step.
        values: by worker, the parameters.
        parts: by worker, its part of the optimizer's state.
    """

    step: int
    values: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    parts: dict[int, Any] = field(default_factory=dict)


class Generation:
    """One exchange of a schedule, from a snapshot to the end or a death.

    Args:
        schedule: the schedule.
        number: of the generation.
        workers, servers: numbers of members.
        start: the snapshot with which all begin; without values: the run's start.

    Attributes:
        mortals: the members.
        progress: of the workers.
        served: makes the exchange.
        snapshots: what the workers have taken, by step.
        errors: by worker, what ended it.
        places: what each server owns of each bucket.
    """

    def __init__(
        self, schedule: Schedule, number: int, workers: int, servers: int, start: Snapshot
    ) -> None:
        self.mortals = schedule.mortals(number, workers, servers)
        self.progress = Progress(workers, start.step)
        self.served = Served(
            servers,
            late=schedule.late,
            limit=LIMIT,
            staleness=schedule.staleness,
            scales_rate=schedule.scales_rate,
            mortals=self.mortals,
        )
        self.snapshots: defaultdict[int, Snapshot] = defaultdict(lambda: Snapshot(0))
        self.errors: dict[int, BaseException] = {}
        self.places: Places = {}
        self._schedule = schedule
        self._number = number
        self._workers = workers
        self._start = start
        self._group = ThreadGroup(workers, LIMIT)

    def run(self) -> None:
        """Train until all threads have ended."""
        threads = [threading.Thread(target=self._run, args=(n,)) for n in range(self._workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.served.end()
        for error in (*self.errors.values(), *self.served.errors):
            if not isinstance(error, PeerLost) or isinstance(error, CommTimeout):
                raise error

    def died(self, kind: str) -> int:
        """Return how many members of a kind have died."""
        return sum(one.dead for (its, _), one in self.mortals.items() if its == kind)

    def newest(self) -> Snapshot:
        """Return the newest snapshot that all workers have taken, or the start."""
        complete = [s for s in self.snapshots.values() if len(s.parts) == self._workers]
        return max(complete, key=lambda snapshot: snapshot.step, default=self._start)

    def _run(self, worker: int) -> None:
        try:
            self._train(self._group.communicator(worker))
        except BaseException as error:
            self.errors[worker] = error
            self.progress.end()
            self._group.abort()

    def _train(self, c: Communicator) -> None:
        schedule, start = self._schedule, self._start
        model = layers()
        optimizer = torch.optim.SGD(
            model.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY
        )
        replica = replicate(model, optimizer, c, schedule.bucket_bytes, self.served)
        try:
            self._restore(replica, model, c)
            if c.rank == 0 and schedule.staleness is None:
                self.places = owned(self.served, replica._binding.synchronizer)
            for step in range(start.step, schedule.steps):
                if step in schedule.snapshots and step > start.step:
                    self._take(replica, model, c, step)
                self._step(replica, model, optimizer, c, step)
            self._take(replica, model, c, schedule.steps)
            replica.drain()
        finally:
            replica.close()

    def _restore(self, replica: Any, model: nn.Module, c: Communicator) -> None:
        """Take the snapshot with which the generation begins; rank 0 has dead members' parts."""
        parts = self._start.parts
        if not parts:
            return
        model.load_state_dict(self._start.values[0])
        own = [parts[c.rank]]
        if c.rank == 0:
            own += [part for worker, part in parts.items() if worker >= c.world_size]
        assert restore_parts(replica._binding.state, own, c)

    def _step(self, replica: Any, model: nn.Module, optimizer: Any, c: Any, step: int) -> None:
        schedule = self._schedule
        if self._number == 0 and (gate := schedule.gates.get((c.rank, step))) is not None:
            self.progress.await_begun(*gate)
        slices = schedule.slices(step, c.world_size)
        x, y = map(torch.from_numpy, slices[c.rank])
        with replica_step(replica, step, len(x) / len(schedule.batches[step][0]), len(x)):
            loss = ((model(x) - y) ** 2).mean()
            behind = step - self._start.step
            read = installed(replica._binding.synchronizer, behind)
            self.progress.begin(c.rank, step, read)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def _take(self, replica: Any, model: nn.Module, c: Communicator, step: int) -> None:
        """Take a snapshot; asynchronous workers are made equal for it."""
        replica.settle()
        meets = self._schedule.staleness is None
        if meets:
            c.all_reduce(torch.zeros(1)).wait("the barrier before the snapshot")
            replica._binding.synchronizer.settle(Weights.MERGED)
        values = copy_state(dict(model.state_dict()))
        part = copy_state(dict(replica._binding.state.local(in_step=False)))
        snapshot = self.snapshots[step]
        snapshot.step = step
        snapshot.values[c.rank] = values
        snapshot.parts[c.rank] = part
        if meets:
            c.all_reduce(torch.zeros(1)).wait("the barrier behind the snapshot")


@cache
def _start() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).double()


def layers() -> nn.Module:
    """Make two linear layers, always the same."""
    return copy.deepcopy(_start())


def installed(synchronizer: Any, behind: int) -> dict[str, int]:
    """Return the version of each parameter on a worker; without staleness, all previous steps."""
    versions = getattr(synchronizer, "installed", [behind] * len(synchronizer.buckets))
    return {
        name: versions[bucket.index] for bucket in synchronizer.buckets for name in bucket.names
    }


def owned(served: Served, synchronizer: Any) -> Places:
    """Return which flat values of each parameter a server owns, by server and bucket."""
    found: dict[tuple[int, int], dict[str, list[int]]] = {}
    for number, server in enumerate(served.running):
        for bucket in synchronizer.buckets:
            places = [
                (name, place)
                for name, p in zip(bucket.names, bucket.parameters, strict=True)
                for place in range(p.numel())
            ]
            values: dict[str, list[int]] = {}
            for name, place in places[server._server.shard(bucket.index)]:
                values.setdefault(name, []).append(place)
            found[number, bucket.index] = values
    return found


@dataclass
class Outcome:
    """What a schedule has come to.

    Attributes:
        lead: the largest lead of a worker.
        generations: their number.
        workers, servers: that died.
        repeated: steps that were trained again.
    """

    lead: int = 0
    generations: int = 0
    workers: int = 0
    servers: int = 0
    repeated: int = 0


def check(schedule: Schedule) -> Outcome:
    """Train by a schedule to the end; require all that must hold.

    Raises:
        AssertionError: something doesn't hold.
        CommError: a wait timed out.
    """
    outcome = Outcome()
    workers, servers = schedule.workers, schedule.servers
    start = Snapshot(0)
    model = Trained({n: p.detach().numpy().copy() for n, p in layers().named_parameters()})
    while True:
        generation = Generation(schedule, outcome.generations, workers, servers, start)
        generation.run()
        outcome.generations += 1
        outcome.lead = max(outcome.lead, generation.progress.lead)
        newest = generation.newest()
        if newest is not start:
            model = judge(schedule, generation, workers, start.step, model)
        check_slots(schedule, generation)
        if newest.step == schedule.steps:
            break
        dead = generation.died("worker"), generation.died("server")
        assert any(dead), "the generation ended without a death"
        workers, servers = workers - dead[0], servers - dead[1]
        outcome.workers += dead[0]
        outcome.servers += dead[1]
        outcome.repeated += generation.progress.beyond(newest.step)
        start = newest
    check_lead(schedule, outcome)
    return outcome


def check_lead(schedule: Schedule, outcome: Outcome) -> None:
    """Require that a worker led by all of the staleness, and none by more."""
    if schedule.staleness is not None:
        assert outcome.lead <= schedule.staleness
        assert outcome.lead == schedule.staleness or outcome.generations > 1


def check_slots(schedule: Schedule, generation: Generation) -> None:
    """Require that no sender has used more slots than a version and the staleness."""
    for slots in generation.served.slots.values():
        assert slots.most <= 1 + (schedule.staleness or 0)


def judge(
    schedule: Schedule, generation: Generation, workers: int, first: int, model: Trained
) -> Trained:
    """Train by NumPy to the newest snapshot; compare each snapshot on the way; return the last."""
    newest = generation.newest().step
    barriers = sorted(step for step in generation.snapshots if step <= newest)
    for begin, end in zip([first, *barriers], barriers, strict=False):
        if schedule.staleness is None:
            model = judge_asynchronous(schedule, generation, workers, (first, begin, end), model)
        snapshot = generation.snapshots[end]
        if schedule.staleness is not None:
            expected = judge_stale(schedule, generation, workers, (first, end), model)
            compare(snapshot, expected)
        else:
            compare(snapshot, model)
    return model if schedule.staleness is None else expected


def judge_stale(
    schedule: Schedule,
    generation: Generation,
    workers: int,
    steps: tuple[int, int],
    start: Trained,
) -> Trained:
    """Return SSP's parameters after some steps of a generation."""
    ssp = StaleModel(start)
    reads = generation.progress.reads
    for step in range(*steps):
        read = [reads[worker, step] for worker in range(workers)]
        for versions in read:
            behind = {step - steps[0] - version for version in versions.values()}
            assert min(behind) >= 0
            assert max(behind) <= (schedule.staleness or 0)
        ssp.step(schedule.slices(step, workers), read)
    return ssp.last


def judge_asynchronous(
    schedule: Schedule,
    generation: Generation,
    workers: int,
    steps: tuple[int, int, int],
    start: Trained,
) -> Trained:
    """Return the parameters of asynchronous SGD between two snapshots of a generation."""
    first, begin, end = steps
    made: Counter[tuple[int, int, int]] = Counter()
    order = []
    for server, bucket, worker, _ in generation.served.order:
        step = first + made[server, bucket, worker]
        made[server, bucket, worker] += 1
        if begin <= step < end:
            order.append(Push((server, bucket), worker, step))
    assert len({*order}) == len(order) == len(generation.places) * workers * (end - begin)

    def slice_of(step: int, worker: int) -> Batch:
        return schedule.slices(step, workers)[worker]

    model = AsynchronousModel(start, generation.places, slice_of, scales_rate=schedule.scales_rate)
    return model.train(order, begin, workers)


def compare(snapshot: Snapshot, expected: Trained) -> None:
    """Require that all workers have the same bits, and what the model has."""
    first, *others = snapshot.values.values()
    for name, value in expected.values.items():
        np.testing.assert_allclose(first[name].numpy(), value, rtol=0, atol=EXACT)
        for other in others:
            assert torch.equal(first[name], other[name])


def watched(seed: int) -> tuple[Schedule, Outcome]:
    """Check a seed's schedule; one that doesn't end ends the process."""
    schedule = Schedule.draw(seed)
    watch = threading.Timer(2 * LIMIT, hung, [seed])
    watch.daemon = True
    watch.start()
    try:
        return schedule, check(schedule)
    except (AssertionError, CommError) as error:
        error.add_note(f"in the schedule of seed {seed}")
        raise
    finally:
        watch.cancel()


def hung(seed: int) -> NoReturn:
    """Show what waits for what, and end."""
    print(f"the schedule of seed {seed} hasn't ended", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(all_threads=True)
    os._exit(1)


def main() -> None:
    """Check schedules."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="the first; default: %(default)s")
    options = parser.parse_args()
    torch.set_num_threads(1)
    layers()  # before threads draw anything
    begin = time.process_time()
    modes: Counter[str] = Counter()
    total = Outcome()
    for seed in range(options.seed, options.seed + options.count):
        schedule, found = watched(seed)
        modes["async" if schedule.staleness is None else f"K = {schedule.staleness}"] += 1
        for name in vars(total):
            setattr(total, name, getattr(total, name) + getattr(found, name))
        if (seed + 1 - options.seed) % 50 == 0:
            print(f"{seed + 1 - options.seed} schedules", file=sys.stderr, flush=True)
    seconds = time.process_time() - begin
    kinds = ", ".join(f"{modes[mode]} {mode}" for mode in sorted(modes))
    print(
        f"{options.count} schedules ({kinds}): leads reach K and never K + 1, each push is in the "
        f"parameters once (NumPy: {EXACT}), no sender used more than K + 1 slots, none hung. "
        f"{total.workers} workers and {total.servers} servers died, {total.repeated} steps were "
        f"trained again. {seconds:.0f} processor-seconds."
    )


if __name__ == "__main__":
    main()
