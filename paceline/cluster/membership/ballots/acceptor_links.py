"""A member's links to the acceptors of the vote: this machine's record, other ones, the witness.

    ask ──▶ this machine's record          answers at once
        ──▶ processes of other machines    any of them answers for its machine
        ──▶ the witness, in its thread

All of it is used on the control line's thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

from paceline.cluster.membership.control_line.frame_kinds import PROMISED, VOTE, supervisor_name
from paceline.cluster.membership.control_line.line import ControlLine
from paceline.cluster.membership.generation import Generation
from paceline.cluster.membership.machine_acceptor import MachineAcceptor
from paceline.cluster.membership.voting.messages import (
    KINDS,
    WITNESS,
    Accept,
    Answer,
    Decided,
    Prepare,
    Request,
    machine_name,
)
from paceline.cluster.membership.voting.successor import acceptors_of
from paceline.cluster.membership.witness import Witness
from paceline.cluster.membership.witness_thread import WitnessThread
from paceline.errors import CommTimeout


class Voter(Protocol):
    """Protocol of a member that votes; all calls are made on the control line's thread."""

    def answered(self, answer: Answer) -> None:
        """Take an acceptor's answer to a request of this member."""

    def decided(self, value: Generation) -> None:
        """Take the outcome that a ballot of this member has decided."""


class AcceptorLinks:
    """Links to the acceptors.

    Args:
        generation: the first generation.
        acceptor: this machine as an acceptor, which `close` closes.
        witness: the witness, if `generation` names one.
        voter: gets the answers to this member's requests.
    """

    def __init__(
        self,
        generation: Generation,
        acceptor: MachineAcceptor,
        witness: Witness | None,
        voter: Voter,
    ) -> None:
        self._acceptor = acceptor
        self._voter = voter
        self._line: ControlLine | None = None
        self._machine_of: dict[str, int] = {}  # of members and supervisors, earlier ones too
        self.know(generation)
        self._witness = None
        if witness is not None:
            self._witness = WitnessThread(witness, self)

    def connect(self, line: ControlLine) -> None:
        """Send through a control line from now on."""
        self._line = line

    @property
    def line(self) -> ControlLine:
        """The control line."""
        assert self._line is not None
        return self._line

    def know(self, generation: Generation) -> None:
        """Remember which processes of a generation are on which machine."""
        for one in generation.members:
            self._machine_of[one.id] = self._machine_of[supervisor_name(one.machine)] = one.machine

    def reached(self, generation: Generation, silence: float) -> set[str]:
        """Return the acceptors among a generation's machines that aren't silent for so long."""
        names = {machine_name(self._acceptor.machine)}
        for name in self.line.connected():
            machine = self._machine_of.get(name)
            if machine in generation.machines and self.line.silence(name) < silence:
                names.add(machine_name(machine))
        return names

    def ask(self, request: Request) -> None:
        """Send a request to all machines that are reached; this one's record answers at once.

        A machine of an earlier generation is no acceptor, but may know the outcome.
        """
        for name in self.line.connected():
            if self._machine_of.get(name) not in (None, self._acceptor.machine):
                self._send(name, request)
        if self._witness is not None and WITNESS in acceptors_of(request.generation):
            self._witness.ask(request)
        reply = self._own_answer(request)
        self.announce(request)
        if reply is not None:
            self.post_answer(reply)

    def reply(self, peer: str, body: Mapping[str, Any]) -> tuple[Request, Answer | None] | None:
        """Take a peer's message: answer a request by this machine's record.

        Returns:
            the request and its answer; None for an answer of the peer, which is passed on.
        """
        message = KINDS[body["kind"]].from_text(body["text"])
        if not isinstance(message, Prepare | Accept):
            self._voter.answered(message)
            return None
        answer = self._own_answer(message)
        if answer is not None:
            self._send(peer, answer)
        return message, answer

    def _own_answer(self, request: Request) -> Answer | None:
        """Answer by this machine's record; None while another process is frozen in its update."""
        try:
            return self._acceptor.answer(request)
        except CommTimeout:  # no vote for now: ballots are repeated
            return None

    def announce(self, request: Request) -> None:
        """Report to the other members of this machine that it takes part in a vote."""
        own = self._acceptor.machine
        others = {
            name
            for name in self.line.connected()
            if self._machine_of.get(name) == own and name != supervisor_name(own)
        }
        self.line.broadcast(PROMISED, {"generation": request.generation.id}, others)

    def report(self, outcome: Decided, generation: Generation) -> None:
        """Report the outcome of a vote to all processes of a generation that are connected."""
        peers = {member.id for member in generation.members}
        peers |= {supervisor_name(machine) for machine in generation.machines}
        for peer in peers & self.line.connected():
            self._send(peer, outcome)

    def post_answer(self, answer: Answer) -> None:
        """Let the voter take an answer on the line's thread; from any thread."""
        self.line.post(partial(self._voter.answered, answer))

    def close(self) -> None:
        """End the witness's thread, and close the acceptor."""
        if self._witness is not None:
            self._witness.close()
        self._acceptor.close()

    def _send(self, peer: str, message: Request | Answer) -> None:
        self.line.send(peer, VOTE, {"kind": type(message).__name__, "text": message.to_text()})
