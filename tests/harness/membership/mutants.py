"""Mutants: rules of the protocol, each of which is left out in one of them.

A mutant replaces functions of the product, or has the simulated processes make a mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

from paceline.cluster.membership.generation import Generation, Member
from paceline.cluster.membership.voting import proposer, successor, witness_rules
from paceline.cluster.membership.voting.acceptor import MachineRecord
from paceline.cluster.membership.voting.messages import (
    WITNESS,
    Accept,
    Accepted,
    Ballot,
    Decided,
    Held,
    Promise,
    Proposal,
    machine_name,
)
from paceline.cluster.membership.voting.successor import View, acceptors_of
from paceline.cluster.membership.voting.witness_rules import WitnessRecord
from tests.harness.membership.processes import Faults

_free_value, _begin, _witness_answer = (
    successor.free_value,
    proposer.begin,
    witness_rules.answer,
)


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """Mutant: the rule that is left out.

    Attributes:
        breaks: the violation that it leads to.
        faults: mistakes of the simulated processes.
        patches: replaced functions: module or class, name, function.
    """

    breaks: str
    faults: Faults = field(default_factory=Faults)
    patches: tuple[tuple[Any, str, Callable[..., Any]], ...] = ()

    @contextmanager
    def applied(self) -> Iterator[Faults]:
        """Replace the functions; give the mistakes of the processes."""
        with ExitStack() as stack:
            for where, name, function in self.patches:
                stack.enter_context(patch.object(where, name, function))
            yield self.faults


def _half_is_enough(generation: Generation, names: Collection[str]) -> bool:
    acceptors = acceptors_of(generation)
    return 2 * len(set(acceptors) & set(names)) >= len(acceptors)


def _write_once(record: WitnessRecord | None, request: Any) -> tuple[WitnessRecord | None, Any]:
    """Keep the first value of a generation, whatever its ballot, and report none in promises."""
    id = request.generation.id
    if record is None or request.generation.descends_from(record.generation.id):
        record = WitnessRecord(generation=request.generation)
    if record.generation.id != id:
        return record, None
    if not isinstance(request, Accept):
        return record, Promise(generation=id, ballot=request.ballot, acceptor=WITNESS)
    if record.accepted is not None and record.accepted.value.id != request.value.id:
        return record, None
    proposal = Proposal(ballot=request.ballot, value=request.value)
    accepted = Accepted(generation=id, ballot=request.ballot, acceptor=WITNESS)
    return replace(record, accepted=proposal), accepted


def _knows_a_newer_one(record: MachineRecord, generation: Generation) -> bool:
    return record.successor_of(generation.id) is not None


def _exits_are_votes(
    generation: Generation, ballot: Ballot, view: View, **options: Any
) -> tuple[Any, Any]:
    state, request = _begin(generation, ballot, view, **options)
    of_the_dead = {
        machine_name(machine)
        for machine in generation.machines
        if all(m.id in view.suspected for m in generation.members if m.machine == machine)
    }
    promises = {
        name: Promise(generation=generation.id, ballot=ballot, acceptor=name)
        for name in of_the_dead
    }
    return replace(state, promises=promises, accepted=frozenset(of_the_dead)), request


def _takes_any_generation(
    record: WitnessRecord | None, request: Any
) -> tuple[WitnessRecord | None, Any]:
    if record is not None and record.generation.id != request.generation.id:
        record = None
    return _witness_answer(record, request)


def _silent_on_lower_ones(
    record: WitnessRecord | None, request: Any
) -> tuple[WitnessRecord | None, Any]:
    record, answer = _witness_answer(record, request)
    return record, None if isinstance(answer, Decided) else answer


def _one_slot(record: MachineRecord, generation: Generation) -> MachineRecord:
    if record.generation is not None and record.generation.id == generation.id:
        return record
    return MachineRecord(generation=generation, holdings=record.holdings)


def _start_by_step(
    generation: Generation, promises: Mapping[str, Promise], present: Collection[Member]
) -> Held | None:
    ids = {member.id for member in present}
    holders: dict[int, dict[str, Held]] = {}
    for promise in promises.values():
        for one in promise.holdings:
            for held in one.held if one.member in ids else ():
                if not held.durable:
                    holders.setdefault(held.step, {})[one.member] = held
    common = {
        step: copies
        for step, copies in holders.items()
        if successor._is_start(next(iter(copies.values())), copies, ids)
    }
    return next(iter(common[max(common)].values())) if common else None


def _always(*_: object) -> bool:
    return True


def _held_by_all(name: Held, copies: Mapping[str, Held], ids: Collection[str]) -> bool:
    return name.durable or copies.keys() == set(ids)


def _joiners_limit_the_start(
    generation: Generation, promises: Mapping[str, Promise], view: View, **options: Any
) -> Generation | None:
    """Offer only what each joiner holds too."""
    names = [{successor._name(held) for held in joiner.held} for joiner in view.joiners]
    if names:
        common = set.intersection(*names)
        promises = {
            name: replace(
                promise,
                holdings=tuple(
                    replace(one, held=tuple(h for h in one.held if successor._name(h) in common))
                    for one in promise.holdings
                ),
            )
            for name, promise in promises.items()
        }
    return _free_value(generation, promises, view, **options)


def _smallest_quorum(
    generation: Generation, promises: Mapping[str, Promise], view: View, **options: Any
) -> Generation | None:
    """Leave out members that promised, as long as those of a quorum are left."""
    rest = dict(promises)
    for name in sorted(promises, reverse=True):
        less = {other: promise for other, promise in rest.items() if other != name}
        if less and successor.is_quorum(generation, [*less, WITNESS]):
            rest = less
    return _free_value(generation, rest, view, **options)


def _from_the_beginning(
    generation: Generation, promises: Mapping[str, Promise], view: View, **options: Any
) -> Generation | None:
    """Decide no step of a durable start: the members look for a checkpoint afterwards."""
    value = _free_value(generation, promises, view, **options)
    if value is None or value.start_token:
        return value
    assert value.first_start is not None
    return replace(value, start=value.first_start)


_TWO = "two successors"
_ROLLED_BACK = "a committed snapshot is rolled back"
_STUCK = "no successor, though a quorum is alive"

MUTANTS: dict[str, Mutant] = {
    "a quorum of N/2": Mutant(
        breaks=_TWO,
        patches=(
            (proposer, "is_quorum", _half_is_enough),
            (successor, "is_quorum", _half_is_enough),
        ),
    ),
    "a write-once witness asked at the end": Mutant(
        breaks=_TWO, patches=((witness_rules, "answer", _write_once),)
    ),
    "acknowledgements after a promise": Mutant(
        breaks=_ROLLED_BACK, patches=((MachineRecord, "has_promised", _knows_a_newer_one),)
    ),
    "answering before recording": Mutant(breaks=_TWO, faults=Faults(answers_first=True)),
    "exits taken as proof without the dead's votes": Mutant(
        breaks=_TWO, patches=((proposer, "begin", _exits_are_votes),)
    ),
    "a witness whose nonce is ignored": Mutant(breaks=_TWO, faults=Faults(ignores_nonce=True)),
    "a witness that takes lower generations": Mutant(
        breaks=_TWO, patches=((witness_rules, "answer", _takes_any_generation),)
    ),
    "records without the generation's token": Mutant(
        breaks=_TWO, patches=((MachineRecord, "in_generation", _one_slot),)
    ),
    "a restarted supervisor that reports an empty record": Mutant(
        breaks=_TWO, faults=Faults(empty_record=True)
    ),
    "keeping the two newest snapshots": Mutant(breaks=_ROLLED_BACK, faults=Faults(keeps_two=True)),
    "a start of which a part has no holder": Mutant(
        breaks="a part of the start has no holder",
        patches=((successor, "_is_start", _held_by_all),),
    ),
    "snapshots named by step alone": Mutant(
        breaks="a member doesn't hold the start",
        patches=((successor, "_start", _start_by_step),),
    ),
    "not dropping what lies beyond a start": Mutant(
        breaks="the start is outside the lineage",
        patches=((successor, "is_in_lineage", _always),),
    ),
    "a start limited by what a joiner holds": Mutant(
        breaks=_ROLLED_BACK, patches=((proposer, "free_value", _joiners_limit_the_start),)
    ),
    "ledger lines void from the start step on": Mutant(
        breaks="a step counts 0 times", faults=Faults(void_from_start=True)
    ),
    "ledger headers with the parent only": Mutant(
        breaks="a step counts 2 times", faults=Faults(parent_only=True)
    ),
    "leaving out a member that promised": Mutant(
        breaks=_STUCK, patches=((proposer, "free_value", _smallest_quorum),)
    ),
    "dropping a snapshot that the record lists": Mutant(
        breaks="a member doesn't hold the start", faults=Faults(drops_unrecorded=True)
    ),
    "a durable start whose step isn't decided": Mutant(
        breaks="a step counts 0 times",
        faults=Faults(finds_checkpoints=True),
        patches=((proposer, "free_value", _from_the_beginning),),
    ),
    "a witness that is silent on lower generations": Mutant(
        breaks=_STUCK, patches=((witness_rules, "answer", _silent_on_lower_ones),)
    ),
}
"""The mutants by what they leave out or do wrong."""
