"""Random schedules of the membership protocol; a seed names one of them.

A *wild* schedule has all that the protocol survives: loss, reordering and duplication of messages,
pauses, partitions, kills of processes and machines, false suspicions, a lost witness, joiners and
leavers. In a *fair* one, processes and machines are killed, and evidence tells the truth: nothing
else fails, and proposers wait for those that are alive.

At the end of each, messages arrive again and nothing more fails: if the text promises a successor,
there must be one, which trains on.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from paceline.cluster.membership.generation import Generation
from paceline.cluster.membership.voting.messages import machine_name
from paceline.cluster.membership.voting.successor import Joiner, View
from tests.harness.membership.endings import is_promised, train_on
from tests.harness.membership.oracle import Violation
from tests.harness.membership.processes import Faults, Worker
from tests.harness.membership.world import World

_THEMES = ("fair", "fair", "mixed", "mixed", "split", "split", "rivals", "rivals", "growth")
_SHAPES_OF = {
    "split": ((1, 1), (1, 1, 1, 1)),
    "rivals": ((1, 1), (2, 1), (1, 1, 1), (2, 2, 1), (1, 1, 1, 1)),
}
SHAPES = ((1, 1), (2, 1), (1, 2), (1, 1, 1), (2, 1, 1), (1, 1, 1, 1), (2,), (3,), (2, 2))
_EVENTS = 220
_NO_FAULTS = Faults()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What happened in a schedule.

    Attributes:
        happened: how often, by name.
        generations: how many were decided after the first.
        promised: whether the text promised a successor at the end.
    """

    happened: Counter[str]
    generations: int
    promised: bool


class Schedule:
    """Schedule: a world and what happens to it.

    Args:
        seed: names the schedule.
        faults: mistakes of the processes.
    """

    def __init__(self, seed: int, faults: Faults = _NO_FAULTS, theme: str = "") -> None:
        rng = self.rng = random.Random(seed)
        theme = theme or rng.choice(_THEMES)
        self.theme, self.fair = theme, theme == "fair"
        self.world = world = World(
            rng,
            rng.choice(_SHAPES_OF.get(theme, SHAPES)),
            faults=faults,
            interval=rng.choice((1, 1, 2)),
            witness=theme == "split" or rng.random() < 0.6,
            parts=theme == "growth" or rng.random() < 0.7,
            completes=seed % 3 == 0,
        )
        weights = {
            self._deliver: 40.0,
            self._step: 14.0,
            self._exchange: 14.0,
            self._vote: 5.0,
            self._enter: 8.0,
            self._expire: 4.0,
            self._kill: rng.choice((0.3, 0.7, 1.5)),
            self._kill_owner_and_holder: rng.choice((0.0, 0.0, 1.0)),
            self._save: rng.choice((0.0, 3.0)),
        }
        world.dying = rng.choice((0.0, 0.0, 0.2))
        self.false = self.leaves = 0.0
        self.batch = rng.choice((1, 2, 4))
        if theme == "mixed":
            world.loss = rng.choice((0.0, 0.0, 0.2))
            world.duplication = rng.choice((0.0, 0.05))
            self.false = rng.choice((0.0, 0.1, 0.3))
            self.leaves = rng.choice((0.0, 0.1))
            weights |= {
                self._pause: rng.choice((0.0, 2.0)),
                self._cut: rng.choice((0.0, 2.0)),
                self._join: rng.choice((0.0, 2.0, 6.0)),
                self._lose_witness: rng.choice((0.0, 0.0, 2.0)),
            }
        elif theme == "split":
            weights |= {
                self._kill: 0.3,
                self._cut: 2.0,
                self._join: 3.0,
                self._kill_informed: rng.choice((0.0, 4.0)),
                self._lose_witness: rng.choice((0.0, 0.5)),
            }
        elif theme == "rivals":
            world.loss = rng.choice((0.0, 0.1))
            world.dying = rng.choice((0.0, 0.03, 0.1))
            self.false = 0.3
            world.isolation = rng.choice((0.0, 0.5))
            weights |= {self._vote: 14.0, self._expire: 8.0, self._kill: 0.1}
            weights |= {self._cut: rng.choice((0.0, 4.0))}
        elif theme == "growth":
            world.loss = rng.choice((0.0, 0.2))
            weights |= {
                self._kill: 0.5,
                self._kill_owner_and_holder: 1.0,
                self._kill_informed: rng.choice((0.0, 6.0)),
                self._join: 4.0,
            }
        self._events = rng.choices(list(weights), list(weights.values()), k=_EVENTS)

    def run(self) -> Outcome:
        """Run the schedule to its end.

        Raises:
            Violation: the protocol was broken.
        """
        for event in self._events:
            event()
        return self._end()

    # Events

    def _deliver(self) -> None:
        world = self.world
        for _ in range(self.batch):
            if world.flight:
                world.deliver(int(self.rng.random() * len(world.flight)))

    def _any_worker(self) -> Worker:
        workers = self.world.workers
        return workers[int(self.rng.random() * len(workers))]

    def _step(self) -> None:
        for worker in self.world.workers:
            if self.rng.random() < 0.6:
                self.world.training.step(worker)

    def _exchange(self) -> None:
        for worker in self.world.workers:
            if self.rng.random() < 0.5:
                self.world.training.exchange(worker, 0.7)

    def _enter(self) -> None:
        for worker in self.world.workers:
            if self.rng.random() < 0.6:
                self.world.enter(worker)

    def _save(self) -> None:
        for worker in self.world.workers:
            self.world.training.save(worker)

    def _vote(self) -> None:
        worker = self._any_worker()
        world, rng = self.world, self.rng
        if not worker.trains or (worker.proposer is not None and rng.random() < 0.7):
            return
        suspected = set()
        for member in worker.generation.members:
            other = world.by_id[member.id]
            if other is worker:
                continue
            if not other.alive:
                if self.fair or rng.random() < 0.9:
                    suspected.add(member.id)
            elif self.fair:
                continue
            elif other.paused or not world.connected(worker.machine, other.machine):
                if rng.random() < 0.8:
                    suspected.add(member.id)
            elif rng.random() < self.false:
                suspected.add(member.id)
                world.happened["false suspicions"] += 1
        leavers = frozenset(
            member.id for member in worker.generation.members if rng.random() < self.leaves
        )
        joiners = self._joiners(worker.generation) if rng.random() < 0.5 else ()
        known = worker.machine.record.has_promised(worker.generation)
        if suspected or leavers or joiners or known:
            view = View(suspected=frozenset(suspected), leavers=leavers, joiners=joiners)
            world.happened["planned changes"] += not suspected and bool(leavers or joiners)
            world.propose(worker, view)

    def _joiners(self, generation: Generation) -> tuple[Joiner, ...]:
        return tuple(
            joiner
            for worker, joiner in self.world.joiners.get(generation.id, ())
            if worker.alive and self.rng.random() < 0.8
        )

    def _expire(self) -> None:
        worker = self._any_worker()
        if worker.proposer is not None and (not self.fair or self._waits_in_vain(worker)):
            self.world.expire(worker)

    def _waits_in_vain(self, worker: Worker) -> bool:
        """Return whether all machines that are alive have promised."""
        assert worker.proposer is not None
        machines = (self.world.machines[number] for number in worker.generation.machines)
        return all(
            machine_name(machine.number) in worker.proposer.promises
            for machine in machines
            if machine.alive
        )

    def _kill(self) -> None:
        world, rng = self.world, self.rng
        chance = rng.random()
        worker = self._any_worker()
        if chance < 0.4:
            world.kill(worker)
        elif chance < 0.6:
            world.kill_supervisor(worker.machine)
        else:
            world.kill_machine(worker.machine)

    def _kill_informed(self) -> None:
        """Kill most of those that know the newest generation, while a member doesn't know it.

        What they have sent is lost with them.
        """
        world, newest = self.world, self.world.oracle.newest
        if newest is world.first:
            return
        records = {machine: machine.record.generation for machine in world.machines.values()}
        informed = [one for one, known in records.items() if known and known.id == newest.id]
        members = {world.machines[number] for number in newest.machines}
        if not informed or all(one in informed for one in members if one.alive):
            return
        for machine in informed:
            chance = self.rng.random()
            if chance < 0.4:
                world.kill_machine(machine)
            elif chance < 0.8:
                for worker in machine.workers:
                    world.kill(worker)
        world.lose_outcomes()

    def _kill_owner_and_holder(self) -> None:
        world, owner = self.world, self._any_worker()
        holder = world.oracle.backups[owner.generation.id].get(owner.id)
        if holder is not None and len(owner.generation.members) > 2:
            world.kill(owner)
            world.kill(world.by_id[holder])

    def _pause(self) -> None:
        worker = self._any_worker()
        worker.paused = not worker.paused
        self.world.happened["pauses"] += worker.paused

    def _cut(self) -> None:
        world, rng = self.world, self.rng
        if world.cut:
            if rng.random() < 0.4:
                world.cut = frozenset()
        else:
            world.cut = frozenset(number for number in world.machines if rng.random() < 0.5)
            world.cut_witness = rng.random() < 0.5
            world.happened["partitions"] += 0 < len(world.cut) < len(world.machines)

    def _join(self) -> None:
        world, donor = self.world, self._any_worker()
        if donor.trains and len(world.workers) < 8:
            machines = [machine for machine in world.machines.values() if machine.supervisor]
            old = self.rng.random() < 0.5 and machines
            world.join(donor, self.rng.choice(machines) if old else None)

    def _lose_witness(self) -> None:
        if self.world.nonce:
            self.world.lose_witness()

    # The end

    def _end(self) -> Outcome:
        world = self.world
        world.loss = world.duplication = world.dying = 0.0
        world.cut = frozenset()
        for worker in world.workers:
            worker.paused = False
        trains = train_on(world)
        promised = is_promised(world, fair=self.fair)
        if promised and not trains:
            raise Violation("no successor, though a quorum is alive")
        world.oracle.check_ledger()
        oracle, happened = world.oracle, world.happened
        successors = oracle.successors.values()
        happened["committed snapshots"] += sum(map(len, oracle.committed.values()))
        happened["durable starts"] += sum(
            not one.start_token and one.start > 0 for one in successors
        )
        joined = (member for one in successors for member in one.members)
        happened["joiners"] += len({member.id for member in joined if member.id.startswith("j")})
        happened["complete copies"] += world.training.completed
        happened["generations"] += len(successors)
        happened["chains of three generations"] += len(successors) >= 2
        happened["chains of four generations"] += len(successors) >= 3
        return Outcome(happened=happened, generations=len(successors), promised=promised)


def run_schedule(seed: int, faults: Faults = _NO_FAULTS) -> Outcome:
    """Run a schedule.

    Raises:
        Violation: the protocol was broken.
    """
    return Schedule(seed, faults).run()
