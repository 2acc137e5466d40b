"""World of a simulated run: its machines, witness and network, and how they vote; no clock, no I/O.

The processes decide by the rules of `paceline.cluster.membership.voting`.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from paceline.cluster.membership.generation import Generation
from paceline.cluster.membership.voting import acceptor, proposer, successor, witness_rules
from paceline.cluster.membership.voting.acceptor import MachineRecord
from paceline.cluster.membership.voting.messages import (
    WITNESS,
    Accept,
    Answer,
    Ballot,
    Prepare,
    Request,
    machine_name,
)
from paceline.cluster.membership.voting.proposer import Proposer
from paceline.cluster.membership.voting.successor import Joiner, View, acceptors_of
from paceline.cluster.membership.voting.witness_rules import WitnessRecord
from tests.harness.membership.generations import first_generation, member
from tests.harness.membership.oracle import Oracle
from tests.harness.membership.processes import Faults, Machine, Message, Worker
from tests.harness.membership.training import Training


class World:
    """World: all processes of one schedule.

    Args:
        rng: the source of all choices.
        shape: the number of workers of each machine.
        faults: mistakes of the processes.
        interval: steps between snapshots.
        witness: whether there is a witness.
        parts: whether a snapshot has a part of each member; else all members' copies are equal.
        completes: whether a member comes to need no other's part of a snapshot.
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
        completes: bool = False,
    ) -> None:
        self.rng, self.faults, self.interval = rng, faults, interval
        self.loss = self.duplication = self.dying = self.isolation = 0.0
        self.cut: frozenset[int] = frozenset()  # machines that the others can't reach
        self.cut_witness = True  # whether these can't reach the witness either
        self.nonce = "nonce" if witness else ""
        self.witness_record: WitnessRecord | None = None
        self.flight: list[Message] = []
        self._sent = 0  # messages
        self._leavers = set[str]()
        self.happened = Counter[str]()
        self.joiners: dict[str, list[tuple[Worker, Joiner]]] = {}
        self._count = 0
        self.first = first_generation(*shape, token=self._token(), witness=self.nonce)
        self.machines = {number: Machine(number=number) for number in range(len(shape))}
        self.workers: list[Worker] = []
        self.by_id: dict[str, Worker] = {}
        self.oracle = Oracle(
            first=self.first,
            copies=self._copies,
            void_from_start=faults.void_from_start,
            parent_only=faults.parent_only,
            parts=parts,
        )
        self.training = Training(
            rng,
            self.oracle,
            self.by_id,
            self.connected,
            faults=faults,
            interval=interval,
            parts=parts,
            completes=parts and completes,
        )
        for one in self.first.members:
            machine = self.machines[one.machine]
            worker = Worker(id=one.id, machine=machine, generation=self.first)
            self._add(worker)
            self.training.enter(worker, self.first, 0)

    # The vote

    def propose(self, worker: Worker, view: View) -> None:
        """Begin a ballot."""
        generation = worker.generation
        self._leavers |= view.leavers
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
        for to in names:
            self._post(worker, to, request, about)

    def _post(
        self, worker: Worker, to: str, content: Request | Answer | Generation, about: Generation
    ) -> None:
        self.flight.append(Message(worker, to, content, about, self._sent))
        self._sent += 1

    def deliver(self, index: int) -> None:
        """Deliver, lose or duplicate a message."""
        flight = self.flight
        message = flight[index]
        if message.to and any(message.overtakes(other) for other in flight):
            self.happened["reordered messages"] += 1
        flight[index], flight[-1] = flight[-1], message
        chance = self.rng.random()
        if chance >= self.duplication:
            flight.pop()
            if chance > 1 - self.loss:
                self.happened["lost messages"] += 1
                return
        else:
            self.happened["duplicated messages"] += 1
        if message.to == "":
            self._take_answer(message)
        elif message.to == WITNESS:
            self._ask_witness(message)
        else:
            self._ask_machine(message)

    def _delay(self, message: Message) -> None:
        self.happened["delayed messages"] += 1
        self.flight.append(message)

    def _ask_machine(self, message: Message) -> None:
        machine = self.machines[int(message.to.removeprefix("machine "))]
        if not (machine.answers and self.connected(machine, message.worker.machine)):
            if machine.alive and self.rng.random() < 0.8:
                self._delay(message)  # it arrives after a pause or a partition
            return
        content = message.content
        if isinstance(content, Generation):
            assert content.descends_from(message.about.id)
            machine.record = machine.record.in_generation(content)
            return
        assert isinstance(content, (Prepare, Accept))
        record, answer = acceptor.answer(machine.record, machine.name, content)
        dies = self.dying and self.rng.random() < self.dying
        if not (dies and self.faults.answers_first):
            machine.record = record
        if answer is not None and not (dies and not self.faults.answers_first):
            self._post(message.worker, "", answer, message.about)
        if dies:
            self._kill_one_that_answers(machine)
            if self.isolation and not self.cut and self.rng.random() < self.isolation:
                self.cut = frozenset({message.worker.machine.number})
                self.cut_witness = True

    def _kill_one_that_answers(self, machine: Machine) -> None:
        workers = [worker for worker in machine.workers if worker.active]
        if machine.supervisor and (not workers or self.rng.random() < 0.5):
            self.kill_supervisor(machine)
        else:
            self.kill(self.rng.choice(workers))

    def _ask_witness(self, message: Message) -> None:
        assert isinstance(message.content, (Prepare, Accept))
        nonce = message.about.witness
        if self.cut_witness and message.worker.machine.number in self.cut:
            if self.rng.random() < 0.8:
                self._delay(message)
            return
        if self.nonce == "" or (nonce != self.nonce and not self.faults.ignores_nonce):
            return
        self.witness_record, answer = witness_rules.answer(self.witness_record, message.content)
        if answer is not None:
            self._post(message.worker, "", answer, message.about)

    def _take_answer(self, message: Message) -> None:
        worker, content = message.worker, message.content
        if worker.alive and worker.paused:
            self._delay(message)
            return
        if not worker.trains or worker.proposer is None:
            return
        assert not isinstance(content, (Generation, Prepare, Accept))
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
            if about.id not in self.oracle.successors:
                self._count_absent(about, value)
            self.oracle.decide(about, value, self._durable_steps(about, value))
        machine = worker.machine
        assert value.descends_from(about.id)
        machine.record = machine.record.in_generation(value)
        worker.proposer = None
        for number in {*about.machines, *value.machines}:
            self._post(worker, machine_name(number), value, about)

    def _count_absent(self, about: Generation, value: Generation) -> None:
        for absent in {one.id for one in about.members} - {one.id for one in value.members}:
            if self.by_id[absent].alive:
                name = "leavers" if absent in self._leavers else "expelled members that live"
                self.happened[name] += 1

    def _durable_steps(self, about: Generation, value: Generation) -> set[int]:
        members = {one.id for one in about.members} & {one.id for one in value.members}
        files = (self.by_id[one].durable for one in members)
        return {file.step for file in files if file is not None}

    def enter(self, worker: Worker) -> None:
        """Enter the next generation, if the machine knows it; or stop."""
        if not (worker.active and not worker.stopped):
            return
        record = worker.machine.record
        after = record.successor_of(worker.generation.id)
        if after is None:
            return
        if all(one.id != worker.id for one in after.members):
            worker.stopped = True
            return
        self.oracle.enter(worker.id, worker.generation, after)
        step = after.start
        if self.faults.finds_checkpoints and not after.start_token:
            step = max(self._durable_steps(after, after), default=step)
        self.training.enter(worker, after, step)
        worker.memory = {
            key: held for key, held in worker.memory.items() if successor.is_in_lineage(held, after)
        }
        if worker.durable is not None and not successor.is_in_lineage(worker.durable, after):
            worker.durable = None

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
        memory = {key: replace(donor.memory[key], parts=(), complete=False) for key in got}
        if self.training.acknowledge(worker, memory):
            joiner = Joiner(member=member(worker.id, machine.number), held=tuple(memory.values()))
            self.joiners.setdefault(donor.generation.id, []).append((worker, joiner))

    # Failures

    def kill(self, worker: Worker) -> None:
        self.happened["killed workers"] += worker.alive
        worker.alive = False
        self._forget(worker.machine)

    def kill_supervisor(self, machine: Machine) -> None:
        self.happened["killed supervisors"] += machine.supervisor
        machine.supervisor = False
        self._forget(machine)

    def kill_machine(self, machine: Machine) -> None:
        self.happened["killed machines"] += machine.alive
        machine.supervisor = False
        for worker in machine.workers:
            worker.alive = False
        self._forget(machine)

    def _forget(self, machine: Machine) -> None:
        if not machine.alive:
            machine.record = MachineRecord()
            machine.supervisor = self.faults.empty_record  # restarted

    def lose_outcomes(self) -> None:
        """Lose all messages under way that tell of a decided generation."""
        left = [one for one in self.flight if not isinstance(one.content, Generation)]
        self.happened["lost messages"] += len(self.flight) - len(left)
        self.flight = left

    def lose_witness(self) -> None:
        """The witness loses its record; what replaces it has another nonce."""
        self._count += 1
        self.happened["lost witnesses"] += 1
        self.nonce, self.witness_record = f"nonce {self._count}", None

    def connected(self, one: Machine, other: Machine) -> bool:
        """Return whether two machines reach each other."""
        return not self.cut or (one.number in self.cut) == (other.number in self.cut)

    def _add(self, worker: Worker) -> None:
        worker.machine.workers.append(worker)
        self.workers.append(worker)
        self.by_id[worker.id] = worker

    def _copies(self, member: str, generation: str, step: int) -> tuple[str, ...] | None:
        held = self.by_id[member].memory.get((generation, step))
        return None if held is None else self.training.parts_of(held)

    def _token(self) -> str:
        self._count += 1
        return f"token {self._count}"
