"""Machines, processes and the network of a run, as the checker simulates them: no clock, no I/O.

What members acknowledge to each other, and parts for backup holders, aren't single messages here: a
member hears a random part of what the others have sent (`exchange`). That is what loss, delay and
reordering of such messages come to. The messages of the vote are single ones.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from paceline.cluster.membership.generation import Generation, Member
from paceline.cluster.membership.voting import acceptor, proposer, successor, witness_rules
from paceline.cluster.membership.voting.acceptor import MachineRecord
from paceline.cluster.membership.voting.messages import (
    WITNESS,
    Answer,
    Ballot,
    Held,
    Prepare,
    Request,
    machine_name,
)
from paceline.cluster.membership.voting.proposer import Proposer
from paceline.cluster.membership.voting.successor import Joiner, View, acceptors_of
from paceline.cluster.membership.voting.witness_rules import WitnessRecord
from tests.harness.membership.oracle import Oracle

Memory = dict[tuple[str, int], Held]  # by generation and step


@dataclass(frozen=True, kw_only=True)
class Faults:
    """Mistakes of the processes around the rules, each of which is a mutant."""

    answers_first: bool = False
    keeps_two: bool = False
    drops_unrecorded: bool = False
    empty_record: bool = False
    ignores_nonce: bool = False
    void_from_start: bool = False
    parent_only: bool = False
    finds_checkpoints: bool = False
    asks_acceptors_only: bool = False


@dataclass(eq=False, kw_only=True)
class Machine:
    """Machine: its record lasts as long as one of its processes."""

    number: int
    record: MachineRecord = field(default_factory=MachineRecord)
    supervisor: bool = True
    workers: list[Worker] = field(default_factory=list)

    @property
    def name(self) -> str:
        return machine_name(self.number)

    @property
    def alive(self) -> bool:
        return self.supervisor or any(worker.alive for worker in self.workers)

    @property
    def answers(self) -> bool:
        return self.supervisor or any(worker.active for worker in self.workers)


@dataclass(eq=False, kw_only=True)
class Worker:
    """Worker process.

    Attributes:
        generation: the one it is in; for a joiner, the one that it wants to join.
        memory: the snapshots that it holds.
        durable: its checkpoint on disk.
        known: by step and member, the parts that were acknowledged, as far as it has heard.
        committed: the newest step of this generation that it knows to be committed.
        stopped: whether it has learned that it is no member any more.
    """

    id: str
    machine: Machine
    generation: Generation
    joining: bool = False
    step: int = 0
    memory: Memory = field(default_factory=dict)
    durable: Held | None = None
    known: dict[int, dict[str, frozenset[str]]] = field(default_factory=dict)
    committed: int = -1
    proposer: Proposer | None = None
    number: int = 0
    alive: bool = True
    paused: bool = False
    stopped: bool = False

    @property
    def active(self) -> bool:
        return self.alive and not self.paused

    @property
    def trains(self) -> bool:
        return self.alive and not (self.paused or self.stopped or self.joining)


@dataclass(frozen=True)
class Message:
    """Message of the vote, on its way."""

    worker: Worker  # that proposes
    to: str  # an acceptor; "": the worker
    content: Request | Answer | Generation  # a generation: the decided one
    about: Generation


class World:
    """World: all processes of one schedule.

    Args:
        rng: the source of all choices.
        shape: the number of workers of each machine.
        faults: mistakes of the processes.
        interval: steps between snapshots.
        witness: whether there is a witness.
        parts: whether a snapshot has a part of each member; else all members' copies are equal.
    """

    def __init__(
        self,
        rng: random.Random,
        shape: tuple[int, ...],
        *,
        faults: Faults,
        interval: int,
        witness: bool,
        parts: bool,
    ) -> None:
        self.rng, self.faults, self.interval, self.parts = rng, faults, interval, parts
        self.loss = self.duplication = self.dying = 0.0
        self.cut: frozenset[int] = frozenset()  # machines that the others can't reach
        self.nonce, self.witness_record = "nonce" if witness else "", None
        self.witness_record: WitnessRecord | None
        self.flight: list[Message] = []
        self.joiners: dict[str, list[tuple[Worker, Joiner]]] = {}
        self._count = 0
        machines = [number for number, count in enumerate(shape) for _ in range(count)]
        members = tuple(
            _member(f"w{rank}", machine, rank - machines.index(machine))
            for rank, machine in enumerate(machines)
        )
        self.first = Generation(number=0, token=self._token(), members=members, witness=self.nonce)
        self.machines = {number: Machine(number=number) for number in range(len(shape))}
        self.workers: list[Worker] = []
        self.by_id: dict[str, Worker] = {}
        for member in members:
            self._add(
                Worker(id=member.id, machine=self.machines[member.machine], generation=self.first)
            )
        self.oracle = Oracle(
            first=self.first,
            copies=self._copies,
            void_from_start=faults.void_from_start,
            parent_only=faults.parent_only,
            parts=parts,
        )
        self.entered: dict[str, dict[str, int]] = {}  # by generation: completed steps of members
        self.sent: dict[tuple[str, int], set[str]] = {}  # owners of parts that were sent
        for worker in self.workers:
            self.entered.setdefault(self.first.id, {})[worker.id] = 0

    # Training

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
        if len(uncommitted) >= 2 and not self.faults.keeps_two:
            return
        worker.step += 1
        steps[worker.id] = worker.step
        self.oracle.write_line(generation, worker.step)
        if worker.step % self.interval == 0:
            self._take_snapshot(worker)

    def _take_snapshot(self, worker: Worker) -> None:
        generation, step = worker.generation, worker.step
        held = Held(
            generation=generation.id,
            token=generation.id,
            step=step,
            parts=(worker.id,) if self.parts else (),
            members=len(generation.members) if self.parts else 0,
        )
        memory = {**worker.memory, (generation.id, step): held}
        if self.faults.keeps_two:
            memory = dict(list(memory.items())[-2:])
        if self.parts:
            self.sent.setdefault((generation.id, step), set()).add(worker.id)
        self._acknowledge(worker, memory)

    def exchange(self, worker: Worker, chance: float) -> None:
        """Hear acknowledgements, and receive parts of others as their backup holder."""
        generation = worker.generation
        if not worker.trains or generation.id not in self.entered:
            return
        if worker.id not in self.entered[generation.id]:
            return
        table = self.oracle.acknowledged.get(generation.id)
        if not table:
            return
        backups = self.oracle.backups[generation.id]
        random_, memory = self.rng.random, worker.memory
        for step, holders in table.items():
            if step <= worker.committed:
                continue
            known = worker.known.setdefault(step, {})
            for member, parts in holders.items():
                if member == worker.id or (
                    random_() < chance
                    and self.connected(worker.machine, self.by_id[member].machine)
                ):
                    known[member] = parts
            held = worker.memory.get((generation.id, step))
            if held is None:
                continue
            new = tuple(
                owner
                for owner in self.sent.get((generation.id, step), ())
                if backups.get(owner) == worker.id
                and owner not in held.parts
                and random_() < chance
                and self.connected(worker.machine, self.by_id[owner].machine)
            )
            if new:
                copy = replace(held, parts=held.parts + new)
                memory = {**memory, (generation.id, step): copy}
        if memory is not worker.memory:
            self._acknowledge(worker, memory)
        self._commit(worker)

    def _commit(self, worker: Worker) -> None:
        generation, count = worker.generation, len(worker.generation.members)
        backups = self.oracle.backups[generation.id]
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
        if self.faults.keeps_two:
            return
        if not self._acknowledge(worker, newer) and self.faults.drops_unrecorded:
            worker.memory = newer

    def save(self, worker: Worker) -> None:
        """Write the newest committed snapshot of this generation to disk."""
        key = worker.generation.id, worker.committed
        if not worker.trains or key not in worker.memory:
            return
        before = worker.durable
        worker.durable = replace(worker.memory[key], parts=(), durable=True)
        if not self._acknowledge(worker, worker.memory):
            worker.durable = before

    def _acknowledge(self, worker: Worker, memory: Memory) -> bool:
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
                        self.oracle.acknowledge(generation, step, worker.id, copy.parts)
        return done

    # The vote

    def propose(self, worker: Worker, view: View) -> None:
        """Begin a ballot."""
        generation = worker.generation
        worker.number += 1
        worker.proposer, request = proposer.begin(
            generation,
            Ballot(worker.number, worker.id),
            view,
            token=self._token(),
            witness=self.nonce,
        )
        self._send(worker, request)

    def expire(self, worker: Worker) -> None:
        """End a proposer's wait for promises."""
        if worker.trains and worker.proposer is not None:
            worker.proposer, request = proposer.expire(worker.proposer)
            if request is not None:
                self._send(worker, request)

    def _send(self, worker: Worker, request: Request) -> None:
        about = request.generation
        names = acceptors_of(about)
        if isinstance(request, Prepare) and not self.faults.asks_acceptors_only:
            others = (machine.name for machine in self.machines.values())
            names += tuple(name for name in others if name not in names)
        self.flight += [Message(worker, to, request, about) for to in names]

    def deliver(self, index: int) -> None:
        """Deliver, lose or duplicate a message."""
        flight = self.flight
        flight[index], flight[-1] = flight[-1], flight[index]
        message = flight[-1]
        chance = self.rng.random()
        if chance >= self.duplication:
            flight.pop()
            if chance > 1 - self.loss:
                return
        if message.to == "":
            self._take_answer(message)
        elif message.to == WITNESS:
            self._ask_witness(message)
        else:
            self._ask_machine(message)

    def _ask_machine(self, message: Message) -> None:
        machine = self.machines[int(message.to.removeprefix("machine "))]
        if not machine.answers:
            if machine.alive and self.rng.random() < 0.8:
                self.flight.append(message)  # a paused process receives it later
            return
        if not self.connected(machine, message.worker.machine):
            return
        content = message.content
        if isinstance(content, Generation):
            machine.record = acceptor.learn(machine.record, message.about, content)
            return
        record, answer = acceptor.answer(machine.record, machine.name, content)
        dies = self.dying and self.rng.random() < self.dying
        if not (dies and self.faults.answers_first):
            machine.record = record
        if answer is not None and not (dies and not self.faults.answers_first):
            self.flight.append(Message(message.worker, "", answer, message.about))
        if dies:
            self._kill_one_that_answers(machine)

    def _kill_one_that_answers(self, machine: Machine) -> None:
        workers = [worker for worker in machine.workers if worker.active]
        if machine.supervisor and (not workers or self.rng.random() < 0.5):
            self.kill_supervisor(machine)
        else:
            self.kill(self.rng.choice(workers))

    def _ask_witness(self, message: Message) -> None:
        assert isinstance(message.content, (Prepare, proposer.Accept))
        nonce = message.about.witness
        if self.cut and message.worker.machine.number in self.cut:
            return
        if self.nonce == "" or (nonce != self.nonce and not self.faults.ignores_nonce):
            return
        self.witness_record, answer = witness_rules.answer(self.witness_record, message.content)
        if answer is not None:
            self.flight.append(Message(message.worker, "", answer, message.about))

    def _take_answer(self, message: Message) -> None:
        worker, content = message.worker, message.content
        if worker.alive and worker.paused:
            self.flight.append(message)
            return
        if not worker.trains or worker.proposer is None:
            return
        assert not isinstance(content, (Generation, Prepare, proposer.Accept))
        before = worker.proposer
        worker.proposer, request = proposer.receive(before, content)
        after = worker.proposer
        if after.highest is not None:
            worker.number = max(worker.number, after.highest.number)
        if request is not None:
            self._send(worker, request)
        if after.phase == "decided" and before.phase != "decided":
            self._decide(worker, after)

    def _decide(self, worker: Worker, state: Proposer) -> None:
        about, value = state.generation, state.value
        assert value is not None
        if value.ancestors[-1].id == about.id:
            self.oracle.decide(about, value, self._durable_steps(about, value))
        machine = worker.machine
        machine.record = acceptor.learn(machine.record, about, value)
        worker.proposer = None
        for number in {*about.machines, *value.machines}:
            self.flight.append(Message(worker, machine_name(number), value, about))

    def _durable_steps(self, about: Generation, value: Generation) -> set[int]:
        members = {member.id for member in about.members} & {member.id for member in value.members}
        files = (self.by_id[member].durable for member in members)
        return {file.step for file in files if file is not None}

    def enter(self, worker: Worker) -> None:
        """Enter the next generation, if the machine knows it; or stop."""
        if not (worker.active and not worker.stopped):
            return
        record = worker.machine.record
        after = record.successor_of(worker.generation.id)
        if after is None:
            return
        if all(member.id != worker.id for member in after.members):
            worker.stopped = True
            return
        self.oracle.enter(worker.id, worker.generation, after)
        worker.generation, worker.joining = after, False
        worker.step, worker.committed, worker.known = after.start, -1, {}
        if self.faults.finds_checkpoints and not after.start_token:
            worker.step = max(self._durable_steps(after, after), default=after.start)
        worker.proposer = None
        worker.memory = {
            key: held for key, held in worker.memory.items() if successor.is_in_lineage(held, after)
        }
        if worker.durable is not None and not successor.is_in_lineage(worker.durable, after):
            worker.durable = None
        self.entered.setdefault(after.id, {})[worker.id] = worker.step

    def join(self, donor: Worker, machine: Machine | None) -> None:
        """Start a process that wants to join; it gets copies of another's snapshots."""
        if machine is None:
            number = len(self.machines)
            machine = self.machines[number] = Machine(number=number)
        self._count += 1
        worker = Worker(
            id=f"j{self._count}", machine=machine, generation=donor.generation, joining=True
        )
        self._add(worker)
        keys = list(donor.memory)
        got = keys[: self.rng.randint(0, len(keys))] if self.rng.random() < 0.5 else keys
        memory = {key: replace(donor.memory[key], parts=()) for key in got}
        if self._acknowledge(worker, memory):
            member = _member(worker.id, machine.number, 0)
            joiner = Joiner(member=member, held=tuple(memory.values()))
            self.joiners.setdefault(donor.generation.id, []).append((worker, joiner))

    # Failures

    def kill(self, worker: Worker) -> None:
        worker.alive = False
        self._forget(worker.machine)

    def kill_supervisor(self, machine: Machine) -> None:
        machine.supervisor = False
        self._forget(machine)

    def kill_machine(self, machine: Machine) -> None:
        machine.supervisor = False
        for worker in machine.workers:
            worker.alive = False
        self._forget(machine)

    def _forget(self, machine: Machine) -> None:
        if not machine.alive:
            machine.record = MachineRecord()
            machine.supervisor = self.faults.empty_record  # restarted

    def lose_witness(self) -> None:
        """The witness loses its record; what replaces it has another nonce."""
        self._count += 1
        self.nonce, self.witness_record = f"nonce {self._count}", None

    def connected(self, one: Machine, other: Machine) -> bool:
        """Return whether two machines reach each other."""
        return not self.cut or (one.number in self.cut) == (other.number in self.cut)

    def training(self) -> Iterator[Worker]:
        """Yield the workers that train or vote."""
        return (worker for worker in self.workers if worker.trains)

    def _add(self, worker: Worker) -> None:
        worker.machine.workers.append(worker)
        self.workers.append(worker)
        self.by_id[worker.id] = worker

    def _copies(self, member: str, generation: str, step: int) -> tuple[str, ...] | None:
        held = self.by_id[member].memory.get((generation, step))
        return None if held is None else held.parts

    def _token(self) -> str:
        self._count += 1
        return f"token {self._count}"


def _member(id: str, machine: int, local_rank: int) -> Member:
    return Member(id=id, role="worker", machine=machine, local_rank=local_rank, address="", host="")
