"""A supervisor's end of the control line: it answers for its machine, and reports exits.

It reports the run's end, too: a signal to one supervisor, or a request to one member, ends the
processes of all machines, also where the store is lost.

It makes the machine's acceptor record, which its workers open, so that the machine has a vote as
long as the supervisor or one of the workers lives. Workers connect to the supervisors of all
machines; supervisors don't connect to each other.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.cluster.membership.acceptor_record import AcceptorRecord
from paceline.cluster.membership.control_line.frame_kinds import (
    END,
    EXITED,
    PROMISED,
    VOTE,
    control_secret,
    supervisor_key,
    supervisor_name,
)
from paceline.cluster.membership.control_line.line import ControlLine
from paceline.cluster.membership.generation import Generation
from paceline.cluster.membership.machine_acceptor import MachineAcceptor
from paceline.cluster.membership.voting.messages import KINDS, Accept, Decided, Prepare, Refused
from paceline.cluster.rendezvous.formed_run import FormedRun
from paceline.cluster.stores.failure_report import FailureReport
from paceline.cluster.supervision.event_queue import EventQueue
from paceline.errors import CommError


@dataclass(frozen=True, kw_only=True)
class WorkerExit:
    """End of a worker, as its supervisor reports it.

    Attributes:
        local_rank: the worker's, in the start's first generation.
        member: the worker's member id; "" for a server.
        name: what messages call the worker.
        text: how it ended, a sentence that begins with the name.
        failed: whether it didn't end well.
    """

    local_rank: int
    member: str
    name: str
    text: str
    failed: bool


class MachineEndpoint:
    """Supervisor's end of the control line.

    Args:
        run: the formed run, before its workers start.
        events: receives the reason for which another process ends the run.
    """

    def __init__(self, run: FormedRun, events: EventQueue) -> None:
        self._events = events
        self._changed = threading.Condition()  # over the generation and the names
        machine = run.registered.plan.machine
        self._generation: Generation = run.generation.with_token_of_join(0)
        self._names = _names_in(self._generation)
        member = next(one for one in self._generation.members if one.machine == machine)
        record = AcceptorRecord.make()
        self._acceptor = MachineAcceptor(record, machine)
        self._line = ControlLine(
            name=supervisor_name(machine),
            secret=control_secret(self._generation),
            address=member.address,
            handler=self,
        )
        entry = {"address": member.address, "port": self._line.port, "record": record.path}
        run.registered.store.set(supervisor_key(self._generation, machine), json.dumps(entry))

    def name_of(self, member: str) -> str:
        """Name a member for messages, by its rank in the newest generation that it was in."""
        # The machine's record may know of a generation before a message about it arrives here.
        self._enter(self._acceptor.successor_of(self._generation))
        return self._names[member]

    def exited(self, end: WorkerExit) -> None:
        """Report the end of a worker to the members that are connected; never waits."""
        if end.failed and end.member:
            how = how_it_ended(end)
            self._line.broadcast(EXITED, {"member": end.member, "how": how})

    def end_run(self, failure: FailureReport) -> None:
        """Report to the members of all machines why the run ends; never waits."""
        self._line.broadcast(END, {"text": failure.text, "status": failure.status})

    def is_lost(self, machine: int) -> bool:
        """Return whether the run continues without a machine, as far as that is known here."""
        self._enter(self._acceptor.successor_of(self._generation))
        return machine not in self._generation.machines

    def ended_without(self, member: str) -> bool:
        """Return whether the world has continued without a member, and has ended since.

        It has ended where none of its members is connected any more.
        """
        self._enter(self._acceptor.successor_of(self._generation))
        members = {one.id for one in self._generation.members}
        return member not in members and not members & self._line.connected()

    def await_change(self, limit: float) -> None:
        """Wait until the connected members continue without this machine."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._acceptor.machine not in self._generation.machines
                    or not self._line.connected()
                ),
                limit,
            )

    def close(self) -> None:
        """End the connections."""
        self._line.close()
        self._acceptor.close()

    def received(self, peer: str, kind: str, body: dict[str, Any], bulk: bytes | bytearray) -> None:
        """Answer a request by the machine's record, or pass the reason for the run's end on."""
        if kind == VOTE:
            self._vote(peer, body)
        elif kind == END:
            self._events.put(FailureReport(text=body["text"], status=body["status"]))

    def opened(self, peer: str) -> None:
        """Do nothing: members connect by themselves."""

    def closed(self, peer: str, reason: str) -> None:
        """Take note of it: members judge each other."""
        with self._changed:
            self._changed.notify_all()

    def _vote(self, peer: str, body: Mapping[str, Any]) -> None:
        message = KINDS[body["kind"]].from_text(body["text"])
        if isinstance(message, Decided):
            self._enter(message.value)
            self._acceptor.learn(message.value)
        if not isinstance(message, Prepare | Accept):
            return
        try:
            reply = self._acceptor.answer(message)
        except CommError:  # a worker was stopped while it changed the record: no vote for now
            return
        if reply is None:
            return
        self._line.send(peer, VOTE, {"kind": type(reply).__name__, "text": reply.to_text()})
        if not isinstance(reply, Refused | Decided):
            here = {
                one.id for one in self._generation.members if one.machine == self._acceptor.machine
            }
            promised = {"generation": message.generation.id}
            self._line.broadcast(PROMISED, promised, here & self._line.connected())

    def _enter(self, generation: Generation | None) -> None:
        """Take note of a decided generation, if it is newer; from any thread."""
        with self._changed:
            if generation is not None and generation.descends_from(self._generation.id):
                self._generation = generation
                self._names = self._names | _names_in(generation)
                self._changed.notify_all()


def how_it_ended(end: WorkerExit) -> str:
    """Return how a worker ended, a clause whose subject is its name."""
    text = end.text.partition(". ")[0].rstrip(".")
    if text.startswith(f"{end.name}: "):  # its own report, which may name it once more
        reason = text.removeprefix(f"{end.name}: ").removeprefix(f"{end.name}: ")
        return f"failed: {reason}"
    return text.removeprefix(f"{end.name} ")


def _names_in(generation: Generation) -> dict[str, str]:
    """Return what messages call the members of a generation, by their ids."""
    return {each.id: generation.describe(rank) for rank, each in enumerate(generation.members)}
