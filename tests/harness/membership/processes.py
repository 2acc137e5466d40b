"""Processes of a simulated run: workers and supervisors of machines, and messages of the vote."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.cluster.membership.generation import Generation
from paceline.cluster.membership.voting.acceptor import MachineRecord
from paceline.cluster.membership.voting.messages import Answer, Held, Request, machine_name
from paceline.cluster.membership.voting.proposer import Proposer

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
    number: int  # how many messages were sent before it

    def overtakes(self, other: Message) -> bool:
        """Return whether the other was sent earlier, by the same process to the same acceptor."""
        return self.number > other.number and self.worker is other.worker and self.to == other.to
