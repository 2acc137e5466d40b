"""A worker's membership: its control line, its machine's record, the witness, the next generation.

each process     publish an address ── await those of all members ── connect ── begin
a lost peer      next_generation: the vote's outcome, as a successor for the step driver
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

from torch._C._distributed_c10d import Store

from paceline.cluster.membership.acceptor_record import AcceptorRecord
from paceline.cluster.membership.evidence import EvidenceOptions
from paceline.cluster.membership.generation import Generation, Group, Member
from paceline.cluster.membership.machine_acceptor import MachineAcceptor
from paceline.cluster.membership.membership import (
    Change,
    Membership,
    OutsideWorld,
    control_secret,
    supervisor_key,
    supervisor_name,
)
from paceline.cluster.membership.witness import Witness
from paceline.cluster.stores.waiting import await_keys
from paceline.errors import CommError, Message


def join_membership(
    group: Group, store: Store, *, options: EvidenceOptions, limit: float
) -> tuple[Group, Membership | None]:
    """Connect a process's control line with those of all members; collective.

    Args:
        group: all ranks of the first generation, as this one sees them.
        store: the store of the start.
        options: limits of silence.
        limit: seconds to wait for the other members.

    Returns:
        the group, whose generation names the witness if there is one; and the membership, None in
        a world of one rank.

    Raises:
        CommError: a member didn't come in time, or can't be reached.
    """
    if group.size == 1:
        return group, None
    key = f"{group.generation.key_prefix}/witness"
    nonce = Witness.create(store, key=key)
    group = replace(group, generation=replace(group.generation, witness=nonce))
    generation, member = group.generation, group.member
    membership = Membership(
        generation,
        member,
        secret=control_secret(generation),
        acceptor=MachineAcceptor(_open_record(group, store, limit), member.machine),
        witness=Witness(store, nonce, key=key) if nonce else None,
        options=options,
    )
    try:
        _connect(membership, generation, member, store, limit)
    except BaseException:
        membership.close()
        raise
    return group, membership


def _open_record(group: Group, store: Store, limit: float) -> AcceptorRecord:
    """Open the acceptor record that this machine's supervisor made, or its first process."""
    generation, machine = group.generation, group.machine
    if store.check([supervisor_key(generation, machine)]):
        entry = json.loads(store.get(supervisor_key(generation, machine)))
        return AcceptorRecord.open(entry["record"])
    key = f"{generation.key_prefix}/record/{machine}"
    if group.local_rank == 0:
        record = AcceptorRecord.make()
        store.set(key, record.path)
        return record
    first = generation.describe(generation.rank_of(machine, 0))
    await_keys(store, [key], limit, lambda _: f"{first} didn't make the acceptor record.")
    return AcceptorRecord.open(store.get(key).decode())


def _connect(
    membership: Membership, generation: Generation, member: Member, store: Store, limit: float
) -> None:
    deadline = monotonic() + limit
    line, prefix = membership.line, f"{generation.key_prefix}/control"
    store.set(f"{prefix}/{member.id}", json.dumps([member.address, line.port]))
    keys = {f"{prefix}/{one.id}": rank for rank, one in enumerate(generation.members)}

    def missing_text(missing: list[str]) -> str:
        names = ", ".join(generation.describe(keys[key]) for key in missing)
        return f"{names} didn't open a control line within {limit:g} s."

    await_keys(store, list(keys), limit, missing_text)
    for key, one in zip(keys, generation.members, strict=True):
        address, port = json.loads(store.get(key))
        line.expect(one.id, address, port)
    for machine in generation.machines:
        if store.check([supervisor_key(generation, machine)]):
            entry: dict[str, Any] = json.loads(store.get(supervisor_key(generation, machine)))
            line.expect(supervisor_name(machine), entry["address"], entry["port"], dial=True)
    missing = line.wait_connected(
        [one.id for one in generation.members], max(0.0, deadline - monotonic())
    )
    if missing:
        ids = [one.id for one in generation.members]
        names = ", ".join(generation.describe(ids.index(one)) for one in sorted(missing))
        raise CommError(
            f"the control line doesn't reach {names} within {limit:g} s: check firewalls between "
            "the machines; any port above 1024 may be used."
        )


@dataclass(frozen=True, kw_only=True)
class LossReport:
    """Report of a change of the generation, for the log and for users.

    Attributes:
        change: the change.
        waited: seconds from the first evidence to the decision.
    """

    change: Change
    waited: float

    @property
    def text(self) -> Message | str:
        """The sentence for users."""
        names = "; ".join(str(reason) for reason in self.change.reasons)
        lost = len(self.change.lost)
        what = names or (f"{lost} members left" if lost else "a connection was lost")
        size = self.change.generation.world_size
        return (
            f"{what.rstrip('.')}. {size} {'process continues' if size == 1 else 'processes continue'} "
            f"as generation {self.change.generation.number} from step "
            f"{self.change.generation.start:,}; decided {self.waited:.2f} s after the first sign."
        )


def decide_next(
    membership: Membership, present: Generation, error: CommError
) -> tuple[Group, LossReport]:
    """Return the next generation, as this member sees it, and what to report.

    Raises:
        OutsideWorld: this member isn't in it, there is none, or it has no state to continue from.
    """
    change = membership.next_generation(present, error)
    generation = change.generation
    if not generation.start_token:
        raise OutsideWorld(
            f"{'; '.join(str(reason) for reason in change.reasons)}: with them, all copies of a "
            "part of the state are lost, so that no snapshot in memory is whole."
        )
    ids = [member.id for member in generation.members]
    group = Group.world(generation, ids.index(membership.id))
    return group, LossReport(change=change, waited=change.decided_at - change.detected_at)
