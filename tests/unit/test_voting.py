"""The rules of the vote on the next generation, one by one: acceptors, witness, proposer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.cluster.membership.generation import Generation
from paceline.cluster.membership.voting import acceptor, proposer, witness_rules
from paceline.cluster.membership.voting.acceptor import MachineRecord
from paceline.cluster.membership.voting.messages import (
    KINDS,
    WITNESS,
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
    machine_name,
)
from paceline.cluster.membership.voting.proposer import Proposer
from paceline.cluster.membership.voting.successor import View
from paceline.cluster.membership.voting.witness_rules import WitnessRecord
from tests.harness.membership.generations import first_generation, next_generation

NOTHING = View()
LOW, MIDDLE, HIGH = Ballot(1, "w0"), Ballot(2, "w0"), Ballot(2, "w1")
PAIR = first_generation(1, 1)
THREE = first_generation(1, 1, 1, token="three")
LATER = next_generation(PAIR, "later")
OTHER = next_generation(PAIR, "other")
HELD = Held(generation=PAIR.id, token=PAIR.id, step=4, parts=("w0",), members=2)


def ask(
    record: MachineRecord, *requests: Request, machine: int = 0
) -> tuple[MachineRecord, Answer | None]:
    answer: Answer | None = None
    for request in requests:
        record, answer = acceptor.answer(record, machine_name(machine), request)
    return record, answer


def prepare(ballot: Ballot, generation: Generation = PAIR) -> Prepare:
    return Prepare(generation=generation, ballot=ballot)


def accept(ballot: Ballot, value: Generation = LATER, generation: Generation = PAIR) -> Accept:
    return Accept(generation=generation, ballot=ballot, value=value)


def test_ballots_are_ordered_by_number_then_by_proposer() -> None:
    assert LOW < MIDDLE < HIGH


def test_a_promise_has_what_was_accepted_and_what_the_members_hold() -> None:
    record, done = acceptor.acknowledge(MachineRecord(), PAIR, "w0", (HELD,))
    assert done
    record, answer = ask(record, accept(LOW), prepare(HIGH))
    assert answer == Promise(
        generation=PAIR.id,
        ballot=HIGH,
        acceptor="machine 0",
        accepted=Proposal(ballot=LOW, value=LATER),
        holdings=(Holdings(member="w0", held=(HELD,)),),
    )
    assert ask(record, prepare(HIGH)) == (record, answer)  # a duplicate changes nothing


@pytest.mark.parametrize("request_", [prepare(MIDDLE), accept(MIDDLE)])
def test_a_lower_ballot_than_was_promised_is_refused(request_: Request) -> None:
    record, _ = ask(MachineRecord(), prepare(HIGH))
    refusal = Refused(generation=PAIR.id, ballot=MIDDLE, acceptor="machine 0", promised=HIGH)
    assert ask(record, request_) == (record, refusal)


def test_accepting_implies_a_promise() -> None:
    record, answer = ask(MachineRecord(), accept(HIGH))
    assert answer == Accepted(generation=PAIR.id, ballot=HIGH, acceptor="machine 0")
    assert isinstance(ask(record, prepare(LOW))[1], Refused)


@pytest.mark.parametrize("request_", [prepare(LOW), accept(LOW)])
def test_a_promise_ends_acknowledgements(request_: Request) -> None:
    record, _ = ask(MachineRecord(), request_)
    assert record.has_promised(PAIR)
    assert acceptor.acknowledge(record, PAIR, "w0", (HELD,)) == (record, False)


def test_a_machine_in_a_newer_generation_says_so_and_its_members_vote_on() -> None:
    record, _ = ask(MachineRecord(), prepare(HIGH))
    record = record.in_generation(LATER)
    decided = Decided(generation=PAIR.id, value=LATER)
    assert ask(record, prepare(Ballot(9, "w1"))) == (record, decided)
    assert record.has_promised(PAIR)
    assert not record.has_promised(LATER)
    assert acceptor.acknowledge(record, LATER, "w0", (HELD,))[1]
    newest = next_generation(LATER, "newest")
    assert record.in_generation(newest).in_generation(LATER).generation == newest
    assert isinstance(ask(record, prepare(LOW, LATER))[1], Promise)


def test_a_request_tells_that_its_generation_was_decided() -> None:
    record, _ = ask(MachineRecord(), accept(LOW), prepare(LOW, LATER))
    assert record.successor_of(PAIR.id) == LATER
    assert (record.promised, record.accepted) == (LOW, None)


def test_a_machine_without_a_vote_only_tells_what_it_knows() -> None:
    record, answer = ask(MachineRecord(), prepare(LOW), machine=7)
    assert answer is None
    assert not record.has_promised(PAIR)
    record = record.in_generation(LATER)
    assert isinstance(ask(record, prepare(LOW), machine=7)[1], Decided)


def test_a_generation_that_isnt_related_changes_nothing() -> None:
    record, _ = ask(MachineRecord(), prepare(HIGH, LATER))
    assert ask(record, prepare(HIGH, OTHER)) == (
        record,
        Decided(generation=OTHER.id, value=LATER),
    )
    assert acceptor.acknowledge(record, OTHER, "w0", (HELD,)) == (record, False)


def test_a_joiners_copies_are_recorded_and_remain_if_it_is_admitted() -> None:
    record, done = acceptor.acknowledge(MachineRecord(), PAIR, "j1", (HELD,))
    assert done
    assert isinstance(promise := ask(record, prepare(LOW))[1], Promise)
    assert promise.holdings == ()
    left_out = record.in_generation(LATER)
    assert left_out.holdings == ()
    (first, second) = LATER.members
    admitted = replace(LATER, members=(first, replace(second, id="j1")))
    assert record.in_generation(admitted).holdings == record.holdings


def test_the_record_stays_small_over_1000_generations() -> None:
    record, generation = MachineRecord(), PAIR
    sizes = []
    for number in range(1000):
        record, _ = acceptor.acknowledge(record, generation, "w0", (HELD,))
        successor = next_generation(generation, f"token {number}")
        record, _ = ask(record, accept(LOW, successor, generation))
        record = record.in_generation(successor)
        generation = successor
        if number in (9, 999):
            sizes.append(len(record.to_text()))
    assert sizes[1] - sizes[0] < 990 * 60  # an ancestor each
    assert MachineRecord.from_text(record.to_text()) == record


def test_the_witness_votes_as_other_acceptors_do() -> None:
    even = replace(PAIR, witness="nonce")
    record, answer = witness_rules.answer(None, prepare(LOW, even))
    assert answer == Promise(generation=even.id, ballot=LOW, acceptor=WITNESS)
    record, answer = witness_rules.answer(record, accept(MIDDLE, LATER, even))
    assert answer == Accepted(generation=even.id, ballot=MIDDLE, acceptor=WITNESS)
    assert witness_rules.answer(record, prepare(LOW, even)) == (
        record,
        Refused(generation=even.id, ballot=LOW, acceptor=WITNESS, promised=MIDDLE),
    )
    _, answer = witness_rules.answer(record, prepare(HIGH, even))
    assert isinstance(answer, Promise)
    assert answer.accepted == Proposal(ballot=MIDDLE, value=LATER)


def test_the_witness_has_no_vote_but_in_the_newest_generation() -> None:
    record, _ = witness_rules.answer(None, accept(HIGH))
    record, answer = witness_rules.answer(record, prepare(LOW, LATER))
    assert isinstance(answer, Promise)
    assert answer.accepted is None
    decided = Decided(generation=PAIR.id, value=LATER)
    assert witness_rules.answer(record, prepare(HIGH)) == (record, decided)
    assert witness_rules.answer(record, prepare(HIGH, OTHER)) == (record, None)
    assert record is not None
    assert WitnessRecord.from_text(record.to_text()) == record


def start(view: View = NOTHING, generation: Generation = THREE) -> Proposer:
    state, request = proposer.begin(generation, LOW, view, token="secret")
    assert request == prepare(LOW, generation)
    return state


def promise(machine: int, accepted: Proposal | None = None) -> Promise:
    return Promise(
        generation=THREE.id, ballot=LOW, acceptor=machine_name(machine), accepted=accepted
    )


def accepted(machine: int) -> Accepted:
    return Accepted(generation=THREE.id, ballot=LOW, acceptor=machine_name(machine))


def receive(state: Proposer, *answers: Answer) -> tuple[Proposer, Request | None]:
    request = None
    for answer in answers:
        assert request is None
        state, request = proposer.receive(state, answer)
    return state, request


def test_a_proposer_waits_for_all_machines_with_an_unsuspected_member() -> None:
    state, request = receive(start(), promise(0), promise(1))
    assert request is None
    _, request = receive(state, promise(2))
    assert isinstance(request, Accept)
    assert [member.id for member in request.value.members] == ["w0", "w1", "w2"]


def test_a_proposer_doesnt_wait_for_those_it_suspects() -> None:
    view = View(suspected=frozenset({"w2"}))
    _, request = receive(start(view), promise(0), promise(1))
    assert isinstance(request, Accept)
    assert [member.id for member in request.value.members] == ["w0", "w1"]


def test_of_one_step_the_snapshot_in_memory_is_the_start_before_a_checkpoint() -> None:
    held = replace(HELD, generation=THREE.id, token=THREE.id, parts=(), members=0)
    both = (held, replace(held, durable=True))
    promises = [
        replace(promise(machine), holdings=(Holdings(member=f"w{machine}", held=both),))
        for machine in range(3)
    ]
    _, request = receive(start(), *promises)
    assert isinstance(request, Accept)
    assert (request.value.start, request.value.start_token) == (4, held.token)


def test_after_the_limit_a_quorum_is_enough_but_not_less() -> None:
    state, _ = receive(start(), promise(0))
    assert proposer.expire(state) == (state, None)
    state, _ = receive(state, promise(1))
    state, request = proposer.expire(state)
    assert isinstance(request, Accept)
    assert proposer.expire(state) == (state, None)


def test_the_accepted_value_of_the_highest_ballot_is_proposed() -> None:
    low, high = next_generation(THREE, "low"), next_generation(THREE, "high")
    _, request = receive(
        start(),
        promise(0, Proposal(ballot=Ballot(0, "w1"), value=low)),
        promise(1, Proposal(ballot=Ballot(0, "w2"), value=high)),
        promise(2),
    )
    assert isinstance(request, Accept)
    assert request.value == high


def test_a_quorum_of_acceptors_decides() -> None:
    state, _ = receive(start(), promise(0), promise(1), promise(2))
    state, _ = receive(state, accepted(1), accepted(1))
    assert state.phase == "accepting"
    state, _ = receive(state, accepted(2))
    assert state.phase == "decided"
    assert state.value is not None
    assert state.value.ancestors == THREE.lineage


def test_a_refusal_ends_a_ballot_and_names_the_higher_one() -> None:
    refusal = Refused(generation=THREE.id, ballot=LOW, acceptor="machine 1", promised=HIGH)
    state, _ = receive(start(), promise(0), refusal)
    assert (state.phase, state.highest) == ("refused", HIGH)
    assert receive(state, promise(1), promise(2)) == (state, None)


def test_an_outcome_ends_the_vote() -> None:
    decided = next_generation(THREE, "decided")
    state, request = receive(start(), Decided(generation=THREE.id, value=decided))
    assert (state.phase, state.value, request) == ("decided", decided, None)


def test_answers_to_other_ballots_and_generations_are_ignored() -> None:
    state = start()
    for other in (
        replace(promise(0), ballot=HIGH),
        replace(promise(0), generation=PAIR.id),
        Refused(generation=THREE.id, ballot=HIGH, acceptor="machine 1", promised=HIGH),
    ):
        assert proposer.receive(state, other) == (state, None)


def test_a_ballot_without_a_member_that_remains_proposes_nothing() -> None:
    view = View(leavers=frozenset({"w0", "w1", "w2"}))
    state, request = receive(start(view), promise(0), promise(1), promise(2))
    assert (state.phase, request) == ("preparing", None)


@pytest.mark.parametrize(
    "message",
    [
        prepare(LOW),
        accept(LOW),
        promise(0, Proposal(ballot=LOW, value=LATER)),
        Promise(
            generation=PAIR.id,
            ballot=LOW,
            acceptor=WITNESS,
            holdings=(Holdings(member="w0", held=(HELD, replace(HELD, durable=True))),),
        ),
        accepted(1),
        Refused(generation=PAIR.id, ballot=LOW, acceptor="machine 0", promised=HIGH),
        Decided(generation=PAIR.id, value=LATER),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_travel_as_json(message: Request | Answer) -> None:
    assert KINDS[type(message).__name__].from_text(message.to_text()) == message
