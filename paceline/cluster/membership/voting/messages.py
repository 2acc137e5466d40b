"""Messages of the vote on the next generation: single-decree Paxos, whose value is a `Generation`.

    proposer                       acceptor (a machine, or the witness)
    Prepare(ballot)  ───────────▶  Promise(ballot, accepted proposal, what its members hold)
    Accept(ballot, value)  ─────▶  Accepted(ballot)
    Decided(value)  ────────────▶  all members

`Prepare` goes to all machines that the proposer reaches: one that has no vote may know the outcome.

A request carries the generation that is voted upon, whole: an acceptor that hasn't learned that it
was decided learns it. A request with a lower ballot than was promised is refused. An acceptor in a
newer generation answers with `Decided`.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.cluster.json_record import JsonRecord
from paceline.cluster.membership.generation import Generation

WITNESS = "witness"


def machine_name(machine: int) -> str:
    """Return the name of a machine as an acceptor."""
    return f"machine {machine}"


@dataclass(frozen=True, order=True)
class Ballot(JsonRecord):
    """Paxos ballot: a number, and the id of the proposing member, which makes it unique."""

    number: int
    proposer: str


@dataclass(frozen=True, kw_only=True)
class Held:
    """Snapshot that a member holds.

    Attributes:
        generation: the id of the generation in which it was taken.
        token: the token in its name.
        step: the number of completed steps in it.
        parts: the ids of the members of which it has the own part here: its holder, and those for
            which that is the backup holder.
        members: the number of members that have a part in it.
        complete: whether its holder needs no other member's part.
        durable: whether it is a checkpoint that the member can read from a disk, alone and whole,
            and not a copy in memory; its parts aren't listed.
    """

    generation: str
    token: str
    step: int
    parts: tuple[str, ...] = ()
    members: int = 0
    complete: bool = False
    durable: bool = False


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """What a member has acknowledged to hold."""

    member: str
    held: tuple[Held, ...]


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Value under a ballot."""

    ballot: Ballot
    value: Generation


@dataclass(frozen=True, kw_only=True)
class Prepare(JsonRecord):
    """Request to promise a ballot (phase 1a)."""

    generation: Generation
    ballot: Ballot


@dataclass(frozen=True, kw_only=True)
class Accept(JsonRecord):
    """Request to accept a value under a ballot (phase 2a)."""

    generation: Generation
    ballot: Ballot
    value: Generation


@dataclass(frozen=True, kw_only=True)
class Promise(JsonRecord):
    """Promise to refuse lower ballots (phase 1b).

    Attributes:
        generation: the id of the generation that is voted upon.
        ballot: the promised ballot.
        accepted: the proposal that it has accepted; None: none.
        holdings: what the machine's members hold.
    """

    generation: str
    ballot: Ballot
    acceptor: str
    accepted: Proposal | None = None
    holdings: tuple[Holdings, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Accepted(JsonRecord):
    """Report that an acceptor has accepted the value of a ballot (phase 2b)."""

    generation: str
    ballot: Ballot
    acceptor: str


@dataclass(frozen=True, kw_only=True)
class Refused(JsonRecord):
    """Refusal of a ballot, because a higher one was promised."""

    generation: str
    ballot: Ballot
    acceptor: str
    promised: Ballot


@dataclass(frozen=True, kw_only=True)
class Decided(JsonRecord):
    """Outcome of a vote.

    Attributes:
        generation: the id of the generation that was voted upon.
        value: its successor, or a later descendant.
    """

    generation: str
    value: Generation


Request = Prepare | Accept
Answer = Promise | Accepted | Refused | Decided
KINDS: dict[str, type[Request] | type[Answer]] = {
    kind.__name__: kind for kind in (Prepare, Accept, Promise, Accepted, Refused, Decided)
}
"""The messages by name."""
