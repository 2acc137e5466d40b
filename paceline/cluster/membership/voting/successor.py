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
class Joiner:
    """Process that wants to join the next generation.

    Attributes:
        member: the process; its machine's number is that of a machine of the run, or a new one. Its
            local rank is dealt anew.
        held: the snapshots that it has acknowledged to hold. It drops none of them before it knows
            the outcome of the vote.
    """

    member: Member
    held: tuple[Held, ...]


@dataclass(frozen=True, kw_only=True)
class View:
    """What a proposer knows of the members.

    Attributes:
        suspected: the ids of those that it suspects to be lost.
        leavers: the ids of those that leave.
        joiners: the processes that want to join. Each is proposed in one generation alone.
    """

    suspected: frozenset[str] = frozenset()
    leavers: frozenset[str] = frozenset()
    joiners: tuple[Joiner, ...] = ()

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


def indispensable_machine(generation: Generation, witness_machine: int | None = None) -> int | None:
    """Return the number of the machine whose loss alone would stop the run; None: there is none.

    Args:
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
    for each in reversed(generation.lineage):  # the newest first
        if each.id == held.generation:
            return True
        # A later generation began before it, so it was given up.
        if held.step > each.start:
            return False
    return False


def free_value(
    generation: Generation,
    promises: Mapping[str, Promise],
    view: View,
    *,
    token: str,
    witness: str | None = None,
) -> Generation | None:
    """Return what to propose where no acceptor has accepted anything.

    It contains every member whose machine has promised and that isn't suspected, leavers excepted,
    and members whose replica of the model isn't whole any more: these leave, too.
    It continues from the newest snapshot that they all hold and of which every part is held by one
    of them, or one needs no other part. Where there is none, or a newer durable one, it continues
    from the newest durable state that one of them can read (`Generation.start_token` is "").

    Joiners that hold its start are in it. They are at most as many as the other members, and the
    machines of these decide without them: the loss of all joiners doesn't stop the run.

    Args:
        generation: the present generation.
        promises: by acceptor.
        view: what the proposer knows.
        token: a new secret.
        witness: the nonce of the next generation's witness; None: as in this generation.

    Returns:
        the value; None where no member would be left.
    """
    present = [
        member
        for member in generation.members
        if machine_name(member.machine) in promises and member.id not in view.absent
    ]
    present = generation.in_whole_replicas(present)
    if not present:
        return None
    start = _start(generation, promises, present)
    first = generation.start if generation.first_start is None else generation.first_start
    value = replace(
        generation,
        number=generation.number + 1,
        token=token,
        members=_in_rank_order(present),
        ancestors=generation.lineage,
        start=first if start is None else start.step,
        start_token="" if start is None or start.durable else start.token,
        witness=generation.witness if witness is None else witness,
        first_start=first,
    )
    return value if start is None else _with_joiners(value, view.joiners, start)


def _start(
    generation: Generation, promises: Mapping[str, Promise], present: Collection[Member]
) -> Held | None:
    """Return the newest snapshot from which these members can continue."""
    ids = {member.id for member in present}
    holders: dict[Held, dict[str, Held]] = {}
    for promise in promises.values():
        for one in promise.holdings:
            for held in one.held if one.member in ids else ():
                if is_in_lineage(held, generation):
                    holders.setdefault(_name(held), {})[one.member] = held
    usable = [name for name, copies in holders.items() if _is_start(name, copies, ids)]
    order = {each.id: index for index, each in enumerate(generation.lineage)}
    return max(
        usable,
        # At one step a snapshot in memory goes before a file: nothing has to be read for it. The
        # rest makes the choice the same for all proposers.
        key=lambda name: (name.step, not name.durable, order[name.generation], name.token),
        default=None,
    )


def _name(held: Held) -> Held:
    """Return what is equal in all members' copies of a snapshot."""
    return replace(held, parts=(), complete=False)


def _is_start(name: Held, copies: Mapping[str, Held], ids: Collection[str]) -> bool:
    """Return whether members continue from a snapshot, given the copies that they hold."""
    parts = {part for copy in copies.values() for part in copy.parts}
    whole = len(parts) == name.members or any(copy.complete for copy in copies.values())
    return name.durable or (copies.keys() == set(ids) and whole)


def _with_joiners(value: Generation, joiners: Collection[Joiner], start: Held) -> Generation:
    """Add the joiners that hold the start, the lowest ids first, as many as are allowed."""
    old = {machine_name(machine) for machine in value.machines} | {WITNESS}
    limit = 2 * value.world_size
    for joiner in sorted(joiners, key=lambda one: one.member.id):
        larger = replace(value, members=_in_rank_order([*value.members, joiner.member]))
        holds = any(_name(held) == start for held in joiner.held)
        if holds and larger.world_size <= limit and is_quorum(larger, old):
            value = larger
    return value


def _in_rank_order(members: Collection[Member]) -> tuple[Member, ...]:
    """Order members by machine, and number the local ranks of each machine from 0."""
    numbers = Counter[int]()
    ordered = []
    # Survivors keep their order, so that most ranks, and with them shards, stay where they are.
    for member in sorted(members, key=lambda each: each.machine):  # joiners after the others
        ordered.append(replace(member, local_rank=numbers[member.machine]))
        numbers[member.machine] += 1
    return tuple(ordered)
