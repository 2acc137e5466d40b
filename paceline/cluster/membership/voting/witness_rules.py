"""The witness as an acceptor: one record for the whole run, of the newest generation it was asked.

A request about an ancestor of that generation is answered with `Decided`: all processes that knew
of the newer one may be lost. The record is replaced whole by compare-and-set; where it lies is
`Witness`'s concern.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.cluster.json_record import JsonRecord
from paceline.cluster.membership.generation import Generation
from paceline.cluster.membership.voting.messages import (
    WITNESS,
    Accept,
    Accepted,
    Answer,
    Ballot,
    Decided,
    Promise,
    Proposal,
    Refused,
    Request,
)


@dataclass(frozen=True, kw_only=True)
class WitnessRecord(JsonRecord):
    """Record of a witness.

    Attributes:
        generation: the generation whose successor is voted upon.
        promised: the highest ballot that was promised or accepted; None: none.
        accepted: the accepted proposal; None: none.
    """

    generation: Generation
    promised: Ballot | None = None
    accepted: Proposal | None = None


def answer(
    record: WitnessRecord | None, request: Request
) -> tuple[WitnessRecord | None, Answer | None]:
    """Answer a request; the answer may be used once the record is replaced.

    Args:
        record: the witness's record; None: it was never asked.

    Returns:
        the new record; and the answer, None where the witness has no vote.
    """
    id = request.generation.id
    ballot = request.ballot
    if record is None or request.generation.descends_from(record.generation.id):
        record = WitnessRecord(generation=request.generation)
    if record.generation.descends_from(id):
        return record, Decided(generation=id, value=record.generation)
    # It has voted in another lineage: an answer here could make two successors.
    if record.generation.id != id:
        return record, None
    if record.promised is not None and ballot < record.promised:
        promised = record.promised
        return record, Refused(generation=id, ballot=ballot, acceptor=WITNESS, promised=promised)
    if isinstance(request, Accept):
        accepted = Proposal(ballot=ballot, value=request.value)
        record = replace(record, promised=ballot, accepted=accepted)
        return record, Accepted(generation=id, ballot=ballot, acceptor=WITNESS)
    record = replace(record, promised=ballot)
    return record, Promise(generation=id, ballot=ballot, acceptor=WITNESS, accepted=record.accepted)
