"""A machine as an acceptor: how its record answers requests and acknowledgements.

All processes of a machine share the record, and any of them answers for it (`AcceptorRecord`). A
promise ends the acknowledgements of the machine's members in that generation: what they hold is in
the promise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from paceline.cluster.json_record import JsonRecord
from paceline.cluster.membership.generation import Generation
from paceline.cluster.membership.voting.messages import (
    Accept,
    Accepted,
    Answer,
    Ballot,
    Decided,
    Held,
    Holdings,
    Prepare,
    Promise,
    Proposal,
    Refused,
    Request,
)

_DECIDED = 2  # votes that are over, and retained with their outcome


@dataclass(frozen=True, kw_only=True)
class VoteRecord:
    """Record of one vote.

    Attributes:
        generation: the generation that is voted upon.
        promised: the highest ballot that was promised or accepted; None: none.
        accepted: the accepted proposal; None: none.
        decided: the outcome; None: unknown.
    """

    generation: Generation
    promised: Ballot | None = None
    accepted: Proposal | None = None
    decided: Generation | None = None


@dataclass(frozen=True, kw_only=True)
class MachineRecord(JsonRecord):
    """Acceptor record of a machine.

    Attributes:
        votes: the votes, the oldest first.
        holdings: what the machine's members have acknowledged to hold.
    """

    votes: tuple[VoteRecord, ...] = ()
    holdings: tuple[Holdings, ...] = ()

    @classmethod
    def read(cls, text: str) -> Self:
        """Read the record's text; that of a new one is empty."""
        return cls.from_text(text) if text else cls()

    def vote(self, generation: Generation) -> VoteRecord:
        """Return the record of the vote on a generation's successor."""
        for vote in self.votes:
            if vote.generation.id == generation.id:
                return vote
        return VoteRecord(generation=generation)

    def successor_of(self, generation: str) -> Generation | None:
        """Return the successor of a generation by its id, or its newest descendant; None: none."""
        for vote in self.votes:
            if vote.generation.id == generation and vote.decided is not None:
                return vote.decided
        for vote in reversed(self.votes):
            for known in filter(None, (vote.decided, vote.generation)):
                if any(ancestor.id == generation for ancestor in known.ancestors):
                    return known
        return None

    def has_promised(self, generation: Generation) -> bool:
        """Return whether the machine takes part in the vote on a successor, or knows it."""
        over = self.successor_of(generation.id) is not None
        return over or self.vote(generation).promised is not None

    def _with(self, vote: VoteRecord) -> Self:
        others = [one for one in self.votes if one.generation.id != vote.generation.id]
        return replace(self, votes=(*others, vote))


def answer(record: MachineRecord, acceptor: str, request: Request) -> tuple[MachineRecord, Answer]:
    """Answer a request; the answer may be sent once the record is replaced.

    Args:
        record: the machine's record.
        acceptor: the machine's name as an acceptor.
        request: the request.

    Returns:
        the new record, and the answer.
    """
    id = request.generation.id
    if (successor := record.successor_of(id)) is not None:
        return record, Decided(generation=id, value=successor)
    vote = record.vote(request.generation)
    if vote.promised is not None and request.ballot < vote.promised:
        promised = vote.promised
        return record, Refused(
            generation=id, ballot=request.ballot, acceptor=acceptor, promised=promised
        )
    vote = replace(vote, promised=request.ballot)
    if isinstance(request, Accept):
        vote = replace(vote, accepted=Proposal(ballot=request.ballot, value=request.value))
        done: Answer = Accepted(generation=id, ballot=request.ballot, acceptor=acceptor)
    else:
        assert isinstance(request, Prepare)
        members = {member.id for member in request.generation.members}
        done = Promise(
            generation=id,
            ballot=request.ballot,
            acceptor=acceptor,
            accepted=vote.accepted,
            holdings=tuple(one for one in record.holdings if one.member in members),
        )
    return record._with(vote), done


def acknowledge(
    record: MachineRecord, generation: Generation, member: str, held: tuple[Held, ...]
) -> tuple[MachineRecord, bool]:
    """Record what a member holds, before it acknowledges that to the others.

    Args:
        record: the machine's record.
        generation: the member's present generation.
        member: its id.
        held: all snapshots that it holds.

    Returns:
        the new record; and False where the machine has promised: then nothing may be acknowledged.
    """
    if record.has_promised(generation):
        return record, False
    others = tuple(one for one in record.holdings if one.member != member)
    return replace(record, holdings=(*others, Holdings(member=member, held=held))), True


def learn(record: MachineRecord, generation: Generation, value: Generation) -> MachineRecord:
    """Record an outcome; it is voted upon from now on. Votes that ended long ago are dropped.

    Args:
        record: the machine's record.
        generation: the generation that was voted upon.
        value: its successor.
    """
    record = record._with(replace(record.vote(generation), decided=value))
    if record.successor_of(value.id) is None:
        record = record._with(record.vote(value))
    older = [one for one in record.votes if any(a.id == one.generation.id for a in value.ancestors)]
    dropped = {one.generation.id for one in older[:-_DECIDED]}
    members = {member.id for one in record.votes[-2:] for member in one.generation.members}
    return replace(
        record,
        votes=tuple(one for one in record.votes if one.generation.id not in dropped),
        holdings=tuple(one for one in record.holdings if one.member in members),
    )
