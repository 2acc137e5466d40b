"""Processes of one machine answer and acknowledge by one record."""

from __future__ import annotations

from paceline.cluster.membership.acceptor_record import AcceptorRecord
from paceline.cluster.membership.machine_acceptor import MachineAcceptor
from paceline.cluster.membership.voting.acceptor import MachineRecord
from paceline.cluster.membership.voting.messages import Ballot, Held, Prepare, Promise
from tests.harness.processes.worlds import world_of


def test_acceptors_of_one_record_see_each_others_changes() -> None:
    generation = world_of((2,)).generation
    record = AcceptorRecord.make()
    first, second = (MachineAcceptor(AcceptorRecord.open(record.path), 0) for _ in range(2))
    ids = [member.id for member in generation.members]

    def held(step: int) -> tuple[Held, ...]:
        return (Held(generation=generation.id, token="t", step=step, parts=(), members=0),)

    for step in (1, 2, 2, 3):
        assert first.acknowledge(generation, ids[0], held(step))
        assert second.acknowledge(generation, ids[1], held(step))
        found = MachineRecord.read(record.read()).holdings
        assert {one.member: one.held for one in found} == dict.fromkeys(ids, held(step))
    ballot = Ballot(1, ids[1])
    promise = second.answer(Prepare(generation=generation, ballot=ballot))
    assert isinstance(promise, Promise)
    assert not first.acknowledge(generation, ids[0], held(3))
    for each in (first, second):
        each.close()
    record.close()
