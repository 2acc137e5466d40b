"""Training of a simulated run: steps, snapshots, acknowledgements, copies for backup holders.

What members acknowledge to each other, and parts for backup holders, aren't single messages here: a
member hears a random part of what the others have sent (`exchange`). That is what loss, delay and
reordering of such messages come to.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from paceline.cluster.membership.generation import Generation
from paceline.cluster.membership.voting import acceptor
from paceline.cluster.membership.voting.messages import Held
from tests.harness.membership.oracle import Oracle
from tests.harness.membership.processes import Faults, Machine, Memory, Worker


class Training:
    """Training of all workers of a schedule.

    Args:
        rng: the source of all choices.
        oracle: observes acknowledgements and the ledger.
        workers: the workers, by id.
        connected: returns whether two machines reach each other.
        faults: mistakes of the processes.
        interval: steps between snapshots.
        parts: whether a snapshot has a part of each member; else all members' copies are equal.
        completes: whether a member that has made further steps comes to need no other's part.

    Attributes:
        completed: how often one came to need no other's part of a snapshot.
    """

    def __init__(
        self,
        rng: random.Random,
        oracle: Oracle,
        workers: Mapping[str, Worker],
        connected: Callable[[Machine, Machine], bool],
        *,
        faults: Faults,
        interval: int,
        parts: bool,
        completes: bool,
    ) -> None:
        self._completes, self.completed = completes, 0
        self._rng, self._oracle, self._workers = rng, oracle, workers
        self._connected, self._faults = connected, faults
        self._interval, self._parts = interval, parts
        self.entered: dict[str, dict[str, int]] = {}  # by generation: completed steps of members
        self._sent: dict[tuple[str, int], list[str]] = {}  # owners of parts that were sent

    def enter(self, worker: Worker, generation: Generation, step: int) -> None:
        """Begin a generation with a worker."""
        worker.generation, worker.joining, worker.step = generation, False, step
        worker.committed, worker.known, worker.proposer = -1, {}, None
        self.entered.setdefault(generation.id, {})[worker.id] = step

    def step(self, worker: Worker) -> None:
        """Complete a step, and take a snapshot, if the protocol and the others let it."""
        generation = worker.generation
        if not worker.trains or worker.machine.record.has_promised(generation):
            return
        steps = self.entered[generation.id]
        if len(steps) < len(generation.members) or min(steps.values()) < worker.step:
            return
        uncommitted = [
            key for key in worker.memory if key[0] == generation.id and key[1] > worker.committed
        ]
        if len(uncommitted) >= 2 and not self._faults.keeps_two:
            return
        worker.step += 1
        steps[worker.id] = worker.step
        self._oracle.write_line(generation, worker.step)
        if worker.step % self._interval == 0:
            self._take_snapshot(worker)

    def _take_snapshot(self, worker: Worker) -> None:
        generation, step = worker.generation, worker.step
        held = Held(
            generation=generation.id,
            token=generation.id,
            step=step,
            parts=(worker.id,) if self._parts else (),
            members=len(generation.members) if self._parts else 0,
        )
        memory = {**worker.memory, (generation.id, step): held}
        if self._faults.keeps_two:
            memory = dict(list(memory.items())[-2:])
        if self._parts:
            self._sent.setdefault((generation.id, step), []).append(worker.id)
        self.acknowledge(worker, memory)

    def exchange(self, worker: Worker, chance: float) -> None:
        """Hear acknowledgements, and receive parts of others as their backup holder."""
        generation = worker.generation
        if not worker.trains or generation.id not in self.entered:
            return
        if worker.id not in self.entered[generation.id]:
            return
        table = self._oracle.acknowledged.get(generation.id)
        if not table:
            return
        backups = self._oracle.backups[generation.id]
        random_, memory = self._rng.random, worker.memory
        for step, holders in table.items():
            if step <= worker.committed:
                continue
            known = worker.known.setdefault(step, {})
            for member, parts in holders.items():
                if member == worker.id or (
                    random_() < chance
                    and self._connected(worker.machine, self._workers[member].machine)
                ):
                    known[member] = parts
            held = worker.memory.get((generation.id, step))
            if held is None:
                continue
            new = tuple(
                owner
                for owner in self._sent.get((generation.id, step), ())
                if backups.get(owner) == worker.id
                and owner not in held.parts
                and random_() < chance
                and self._connected(worker.machine, self._workers[owner].machine)
            )
            complete = held.complete or (self._completes and worker.step > step + 1)
            if new or complete != held.complete:
                self.completed += complete != held.complete
                copy = replace(held, parts=held.parts + new, complete=complete)
                memory = {**memory, (generation.id, step): copy}
        if memory is not worker.memory:
            self.acknowledge(worker, memory)
        self._commit(worker)

    def _commit(self, worker: Worker) -> None:
        generation, count = worker.generation, len(worker.generation.members)
        backups = self._oracle.backups[generation.id]
        for step in sorted(worker.known, reverse=True):
            known = worker.known[step]
            if len(known) == count and all(part in known[one] for part, one in backups.items()):
                break
        else:
            return
        worker.committed = step
        worker.known = {s: known for s, known in worker.known.items() if s > step}
        newer = {
            key: held
            for key, held in worker.memory.items()
            if key[0] == generation.id and key[1] >= step
        }
        if self._faults.keeps_two:
            return
        if not self.acknowledge(worker, newer) and self._faults.drops_unrecorded:
            worker.memory = newer

    def save(self, worker: Worker) -> None:
        """Write the newest committed snapshot of this generation to disk."""
        key = worker.generation.id, worker.committed
        if not worker.trains or key not in worker.memory:
            return
        before = worker.durable
        worker.durable = replace(worker.memory[key], parts=(), complete=False, durable=True)
        if not self.acknowledge(worker, worker.memory):
            worker.durable = before

    def acknowledge(self, worker: Worker, memory: Memory) -> bool:
        """Record that a worker holds these snapshots, if it may; return whether."""
        held = tuple(memory.values())
        if worker.durable is not None:
            held = (*held, worker.durable)
        machine, generation = worker.machine, worker.generation
        machine.record, done = acceptor.acknowledge(machine.record, generation, worker.id, held)
        if done:
            worker.memory = memory
            if not worker.joining:
                for (id, step), copy in memory.items():
                    if id == generation.id:
                        self._oracle.acknowledge(generation, step, worker.id, self.parts_of(copy))
        return done

    def parts_of(self, held: Held) -> tuple[str, ...]:
        """Return the ids of the members whose part of a snapshot a copy has."""
        if held.complete:
            return tuple(each.id for each in self._oracle.generations[held.token].members)
        return held.parts
