"""Which acceptors decide, and what a proposer with a free choice proposes.

machines   witness   acceptors                     quorum
odd        any       the machines                  more than half
even       yes       the machines, the witness     more than half
even       none      the machines                  more than half, or half with the lowest
                                                   machine number (the casting vote)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from paceline.cluster.membership.generation import Generation, Member
from paceline.cluster.membership.voting.messages import WITNESS, Held, Promise, machine_name


@dataclass(frozen=True, kw_only=True)
class View:
    """What a proposer knows of the members.

    Attributes:
        suspected: the ids of those that it suspects to be lost.
        leavers: the ids of those that leave.
    """

    suspected: frozenset[str] = frozenset()
    leavers: frozenset[str] = frozenset()

    @property
    def absent(self) -> frozenset[str]:
        """The ids of those that the next generation doesn't need."""
        return self.suspected | self.leavers


def acceptors_of(generation: Generation) -> tuple[str, ...]:
    """Return the names of the acceptors of the vote on a generation's successor."""
    machines = tuple(machine_name(machine) for machine in generation.machines)
    return (*machines, WITNESS) if len(machines) % 2 == 0 and generation.witness else machines


def is_quorum(generation: Generation, names: Collection[str]) -> bool:
    """Return whether these acceptors decide."""
    acceptors = acceptors_of(generation)
    votes = len(set(acceptors) & set(names))
    if 2 * votes == len(acceptors):
        return acceptors[0] in names  # without a witness: the casting vote
    return 2 * votes > len(acceptors)


def who_would_stop_it(generation: Generation, witness_machine: int | None = None) -> int | None:
    """Return the number of the machine whose loss alone would stop the run; None: there is none.

    Args:
        generation: the generation.
        witness_machine: the machine of the run on which the witness is, if it is on one.
    """
    machines = generation.machines
    for machine in machines:
        left = {machine_name(other) for other in machines if other != machine}
        if witness_machine != machine:
            left.add(WITNESS)
        if not left or not is_quorum(generation, left):
            return machine
    return None


def is_in_lineage(held: Held, generation: Generation) -> bool:
    """Return whether a snapshot belongs to a generation's history.

    It was taken in the generation, or in an ancestor and not beyond the start of a later one.
    """
    lineage = generation.lineage
    ids = [each.id for each in lineage]
    if held.generation not in ids:
        return False
    later = lineage[ids.index(held.generation) + 1 :]
    return all(held.step <= each.start for each in later)


def free_value(
    generation: Generation,
    promises: Mapping[str, Promise],
    view: View,
    *,
    token: str,
) -> Generation | None:
    """Return what to propose where no acceptor has accepted anything.

    It contains every member whose machine has promised and that isn't suspected, leavers excepted.
    It continues from the newest snapshot that they all hold and of which every part is held by one
    of them; where there is none, from the durable state (`Generation.start_token` is "").

    Args:
        generation: the present generation.
        promises: by acceptor.
        view: what the proposer knows.
        token: a new secret.

    Returns:
        the value; None where no member would be left.
    """
    present = [
        member
        for member in generation.members
        if machine_name(member.machine) in promises and member.id not in view.absent
    ]
    if not present:
        return None
    start = _start(generation, promises, present)
    return replace(
        generation,
        number=generation.number + 1,
        token=token,
        members=_with_dense_local_ranks(present),
        ancestors=generation.lineage,
        start=0 if start is None else start.step,
        start_token="" if start is None else start.token,
    )


def _start(
    generation: Generation, promises: Mapping[str, Promise], present: Collection[Member]
) -> Held | None:
    """Return the newest snapshot from which these members can continue."""
    ids = {member.id for member in present}
    holders: dict[tuple[str, int], dict[str, Held]] = {}
    for promise in promises.values():
        for one in promise.holdings:
            for held in one.held if one.member in ids else ():
                if is_in_lineage(held, generation):
                    holders.setdefault((held.token, held.step), {})[one.member] = held
    order = [each.id for each in generation.lineage]
    best: Held | None = None
    for by_member in holders.values():
        held = next(iter(by_member.values()))
        parts = {part for each in by_member.values() for part in each.parts}
        if by_member.keys() != ids or len(parts) < held.members:
            continue
        age = (held.step, order.index(held.generation))
        if best is None or age > (best.step, order.index(best.generation)):
            best = held
    return best


def _with_dense_local_ranks(members: Collection[Member]) -> tuple[Member, ...]:
    """Number the local ranks of each machine's members from 0."""
    numbers = Counter[int]()
    dense = []
    for member in members:
        dense.append(replace(member, local_rank=numbers[member.machine]))
        numbers[member.machine] += 1
    return tuple(dense)
