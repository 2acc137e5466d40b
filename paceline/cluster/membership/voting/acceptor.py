"""A machine as an acceptor: how its record answers requests and acknowledgements.

All processes of a machine share the record, and any of them answers for it (`AcceptorRecord`). A
promise ends the acknowledgements of the machine's members in that generation: what they hold is in
the promise.

The record is of the newest generation that the machine knows. Its vote on an ancestor of that one
is over, so it isn't retained: a request about an ancestor is answered with `Decided`.
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
    Promise,
    Proposal,
    Refused,
    Request,
)
from paceline.cluster.membership.voting.successor import acceptors_of


@dataclass(frozen=True, kw_only=True)
class MachineRecord(JsonRecord):
    """Acceptor record of a machine.

    Attributes:
        generation: the newest generation that the machine knows; None: it knows none.
        promised: the highest ballot that was promised or accepted for its successor; None: none.
        accepted: the accepted proposal of its successor; None: none.
        holdings: what the machine's members, and processes that want to join, have acknowledged to
            hold.
    """

    generation: Generation | None = None
    promised: Ballot | None = None
    accepted: Proposal | None = None
    holdings: tuple[Holdings, ...] = ()

    @classmethod
    def read(cls, text: str) -> Self:
        """Read the record's text; that of a new one is empty."""
        return cls.from_text(text) if text else cls()

    def successor_of(self, generation: str) -> Generation | None:
        """Return the newest known descendant of a generation by its id; None: none is known."""
        known = self.generation
        return known if known is not None and known.descends_from(generation) else None

    def has_promised(self, generation: Generation) -> bool:
        """Return whether the machine takes part in the vote on a successor, or knows it."""
        if self.generation is None or generation.descends_from(self.generation.id):
            return False
        return self.generation.id != generation.id or self.promised is not None

    def in_generation(self, generation: Generation) -> Self:
        """Return the record after the machine has learned of a generation, if it is newer."""
        if self.generation is not None and not generation.descends_from(self.generation.id):
            return self
        members = {member.id for member in generation.members}
        holdings = tuple(one for one in self.holdings if one.member in members)
        return type(self)(generation=generation, holdings=holdings)


def answer(
    record: MachineRecord, acceptor: str, request: Request
) -> tuple[MachineRecord, Answer | None]:
    """Answer a request; the answer may be sent once the record is replaced.

    Args:
        acceptor: the machine's name as an acceptor.

    Returns:
        the new record; and the answer, None where the machine has no vote: it is asked because it
        may know the outcome.
    """
    record = record.in_generation(request.generation)
    id = request.generation.id
    ballot = request.ballot
    known = record.generation
    assert known is not None
    if known.id != id:
        return record, Decided(generation=id, value=known)
    # It has no vote, and is asked because it might have known the outcome.
    if acceptor not in acceptors_of(known):
        return record, None
    if record.promised is not None and ballot < record.promised:
        promised = record.promised
        return record, Refused(generation=id, ballot=ballot, acceptor=acceptor, promised=promised)
    if isinstance(request, Accept):
        accepted = Proposal(ballot=ballot, value=request.value)
        record = replace(record, promised=ballot, accepted=accepted)
        return record, Accepted(generation=id, ballot=ballot, acceptor=acceptor)
    record = replace(record, promised=ballot)
    members = {member.id for member in request.generation.members}
    return record, Promise(
        generation=id,
        ballot=ballot,
        acceptor=acceptor,
        accepted=record.accepted,
        holdings=tuple(one for one in record.holdings if one.member in members),
    )


def acknowledge(
    record: MachineRecord, generation: Generation, member: str, held: tuple[Held, ...]
) -> tuple[MachineRecord, bool]:
    """Record what a member holds: before it acknowledges a snapshot, and before it drops one.

    Args:
        generation: the member's present generation; for a process that wants to join, the one that
            it wants to join.
        held: all snapshots that it holds.

    Returns:
        the new record; and False where the machine has promised: then the member acknowledges
        nothing more in this generation, and drops nothing before it enters the next one.
    """
    record = record.in_generation(generation)
    if record.has_promised(generation):
        return record, False
    holdings = Holdings(member=member, held=held)
    if holdings in record.holdings:
        return record, True
    others = tuple(one for one in record.holdings if one.member != member)
    return replace(record, holdings=(*others, holdings)), True
