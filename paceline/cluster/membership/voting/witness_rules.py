"""The witness as an acceptor: one record for the whole run, of the newest generation it was asked.

It refuses lower generations, and another one of an equal number. The record is replaced whole by
compare-and-set; where it lies is `Witness`'s concern.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.cluster.json_record import JsonRecord
from paceline.cluster.membership.voting.messages import (
    WITNESS,
    Accept,
    Accepted,
    Answer,
    Ballot,
    Promise,
    Proposal,
    Refused,
    Request,
)


@dataclass(frozen=True, kw_only=True)
class WitnessRecord(JsonRecord):
    """Record of a witness.

    Attributes:
        number: the number of the generation that is voted upon.
        generation: its id.
        promised: the highest ballot that was promised or accepted; None: none.
        accepted: the accepted proposal; None: none.
    """

    number: int
    generation: str
    promised: Ballot | None = None
    accepted: Proposal | None = None


def answer(
    record: WitnessRecord | None, request: Request
) -> tuple[WitnessRecord | None, Answer | None]:
    """Answer a request; the answer may be used once the record is replaced.

    Args:
        record: the witness's record; None: it was never asked.
        request: the request.

    Returns:
        the new record; and the answer, None where the witness has no vote.
    """
    number, id = request.generation.number, request.generation.id
    if record is None or record.number < number:
        record = WitnessRecord(number=number, generation=id)
    if record.number > number or record.generation != id:
        return record, None
    if record.promised is not None and request.ballot < record.promised:
        promised = record.promised
        return record, Refused(
            generation=id, ballot=request.ballot, acceptor=WITNESS, promised=promised
        )
    record = replace(record, promised=request.ballot)
    if isinstance(request, Accept):
        proposal = Proposal(ballot=request.ballot, value=request.value)
        accepted = Accepted(generation=id, ballot=request.ballot, acceptor=WITNESS)
        return replace(record, accepted=proposal), accepted
    return record, Promise(
        generation=id, ballot=request.ballot, acceptor=WITNESS, accepted=record.accepted
    )
