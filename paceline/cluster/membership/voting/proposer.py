"""A proposer of the next generation: a state machine without clock, threads or I/O.

    begin ── Prepare ──▶ preparing ── promises ──▶ accepting ── a quorum accepted ──▶ decided
                             └────────── a refusal ──────┴──▶ refused: begin with a higher ballot

It waits for the promises of all machines that have an unsuspected member, because the value must
contain these members; where it can't wait any longer (`expire`), a quorum suffices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from paceline.cluster.membership.generation import Generation
from paceline.cluster.membership.voting.messages import (
    WITNESS,
    Accept,
    Accepted,
    Answer,
    Ballot,
    Decided,
    Prepare,
    Promise,
    Proposal,
    Refused,
    Request,
    machine_name,
)
from paceline.cluster.membership.voting.successor import View, free_value, is_quorum


@dataclass(frozen=True, kw_only=True)
class Proposer:
    """State of one ballot.

    Attributes:
        generation: the generation that is voted upon.
        view: what the proposer knows of the members.
        token: the secret of the value that it proposes, if the choice is free.
        witness: the nonce of that value's witness; None: as in this generation.
        phase: what it waits for.
        promises: by acceptor.
        accepted: the acceptors that have accepted the value.
        value: what is proposed, or was decided.
        highest: the highest ballot that a refusal names.
    """

    generation: Generation
    ballot: Ballot
    view: View
    # A secret: no message or log shows it.
    token: str = field(repr=False)
    witness: str | None = None
    phase: Literal["preparing", "accepting", "decided", "refused"] = "preparing"
    promises: Mapping[str, Promise] = field(default_factory=dict)
    accepted: frozenset[str] = frozenset()
    value: Generation | None = None
    highest: Ballot | None = None


def begin(
    generation: Generation,
    ballot: Ballot,
    view: View,
    *,
    token: str,
    witness: str | None = None,
) -> tuple[Proposer, Request]:
    """Begin a ballot; return the state, and the request.

    The request goes to the witness and to all machines that are reached, those of other generations
    too: one that isn't an acceptor may know the outcome.

    Args:
        generation: the generation that is voted upon.
        ballot: a ballot of this proposer that it has never begun, higher than those it has seen.
        view: what the proposer knows of the members.
        token: a new secret, for the value if the choice is free.
        witness: the nonce of that value's witness; None: as in this generation.
    """
    proposer = Proposer(
        generation=generation, ballot=ballot, view=view, token=token, witness=witness
    )
    return proposer, Prepare(generation=generation, ballot=ballot)


def receive(proposer: Proposer, answer: Answer) -> tuple[Proposer, Request | None]:
    """Take an acceptor's answer; return the state, and a request to all acceptors, if any."""
    if answer.generation != proposer.generation.id or proposer.phase == "decided":
        return proposer, None
    if isinstance(answer, Decided):
        return replace(proposer, phase="decided", value=answer.value), None
    if answer.ballot != proposer.ballot or proposer.phase == "refused":
        return proposer, None
    if isinstance(answer, Refused):
        return replace(proposer, phase="refused", highest=answer.promised), None
    if isinstance(answer, Promise):
        if proposer.phase != "preparing":
            return proposer, None
        promises = {**proposer.promises, answer.acceptor: answer}
        proposer = replace(proposer, promises=promises)
        return _propose(proposer) if _has_all(proposer) else (proposer, None)
    assert isinstance(answer, Accepted)
    proposer = replace(proposer, accepted=proposer.accepted | {answer.acceptor})
    if proposer.phase == "accepting" and is_quorum(proposer.generation, proposer.accepted):
        proposer = replace(proposer, phase="decided")
    return proposer, None


def expire(proposer: Proposer) -> tuple[Proposer, Request | None]:
    """Wait no longer for promises: a quorum suffices; return as `receive`.

    Where there is no quorum yet, the state remains as it is: this is called again later.
    """
    if proposer.phase != "preparing" or not is_quorum(proposer.generation, proposer.promises):
        return proposer, None
    return _propose(proposer)


def _has_all(proposer: Proposer) -> bool:
    """Return whether all machines with an unsuspected member have promised, and they decide."""
    absent = proposer.view.absent
    awaited = {
        machine_name(member.machine)
        for member in proposer.generation.members
        if member.id not in absent
    }
    return awaited <= proposer.promises.keys() and is_quorum(proposer.generation, proposer.promises)


def _propose(proposer: Proposer) -> tuple[Proposer, Request | None]:
    """Propose the accepted value of the highest ballot; where there is none, a free one."""
    generation = proposer.generation
    accepted: list[Proposal] = [
        promise.accepted for promise in proposer.promises.values() if promise.accepted is not None
    ]
    # It may be decided already: Paxos is safe because a higher ballot proposes it again.
    if accepted:
        value: Generation | None = max(accepted, key=lambda each: each.ballot).value
    else:
        machines = {name: one for name, one in proposer.promises.items() if name != WITNESS}
        value = free_value(
            generation, machines, proposer.view, token=proposer.token, witness=proposer.witness
        )
    if value is None:
        return proposer, None
    proposer = replace(proposer, phase="accepting", value=value)
    return proposer, Accept(generation=generation, ballot=proposer.ballot, value=value)
