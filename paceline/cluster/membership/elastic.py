"""Elastic membership: the loss of a member ends a generation, and the others vote on the next one.

each process     publish an address ── await those of all members ── connect ── begin
a lost peer      next_generation: the vote's outcome, as a successor for the step driver
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from signal import Signals
from socket import gethostbyname
from time import monotonic
from typing import Any, Protocol

from torch._C._distributed_c10d import Store

from paceline.cluster.membership.acceptor_record import AcceptorRecord
from paceline.cluster.membership.control_line.frame_kinds import (
    control_secret,
    supervisor_key,
    supervisor_name,
)
from paceline.cluster.membership.evidence import EvidenceOptions
from paceline.cluster.membership.generation import Generation, Group, Member
from paceline.cluster.membership.machine_acceptor import MachineAcceptor
from paceline.cluster.membership.protocol import (
    FrameHandler,
    InterruptibleGeneration,
    Membership,
    Successor,
)
from paceline.cluster.membership.snapshot_name import SnapshotName
from paceline.cluster.membership.static import StaticMembership, connect_members
from paceline.cluster.membership.voting.messages import Held
from paceline.cluster.membership.voting.successor import indispensable_machine
from paceline.cluster.membership.voting_member import VotingMember
from paceline.cluster.membership.witness import Witness
from paceline.cluster.stores.failure_report import FailureReport
from paceline.cluster.stores.polled_store import PolledStore
from paceline.cluster.stores.waiting import await_keys
from paceline.errors import CommError, Message


class EndSignals(Protocol):
    """Protocol of the signals that end a process, by its user or by another process of the run."""

    def when_received(self, report: Callable[[Signals], None]) -> None:
        """Call a further function with the signal, in another thread."""

    def stop(self, supervised: bool) -> None:
        """End this process, because another one ends the run; from any thread."""


def join_membership(
    group: Group,
    store: Store,
    resources: ExitStack,
    signals: EndSignals,
    *,
    options: EvidenceOptions,
    limit: float,
    report: Callable[[Message], object],
) -> tuple[Group, Membership]:
    """Connect a process's control line with those of all members; collective.

    A signal to one process ends the run on all machines from now on.

    Args:
        group: all ranks of the first generation, as this one sees them.
        store: the store of the start.
        resources: closes the membership.
        signals: what ends this process.
        options: limits of silence.
        limit: seconds to wait for the other members.
        report: prints a line.

    Returns:
        the group, whose generation names the witness if there is one; and the membership, a static
        one in a world of one rank.

    Raises:
        CommError: a member didn't come in time, or can't be reached.
    """
    if group.size == 1:
        return group, StaticMembership(store)
    key = f"{group.generation.key_prefix}/witness"
    nonce = Witness.create(store, key=key)
    group = replace(group, generation=replace(group.generation, witness=nonce))
    generation = group.generation
    member = group.member
    voter = VotingMember(
        generation,
        member,
        secret=control_secret(generation),
        acceptor=MachineAcceptor(_open_record(group, store, limit), member.machine),
        witness=Witness(store, nonce, key=key) if nonce else None,
        options=options,
        report=report,
    )
    resources.callback(voter.close)
    _connect(voter, generation, member, store, limit)
    membership = ElasticMembership(voter, generation, store, _witness_machine(generation, store))
    membership.end_with(signals)
    return group, membership


def _witness_machine(generation: Generation, store: Store) -> int | None:
    """Return the machine of the run on which the witness is, if that is known."""
    host = store.host if isinstance(store, PolledStore) and generation.witness else ""
    address = ""
    with suppress(OSError):
        address = gethostbyname(host) if host else ""
    found = (one for one in generation.members if host == one.host or address == one.address)
    return next((one.machine for one in found), None)


def _open_record(group: Group, store: Store, limit: float) -> AcceptorRecord:
    """Open the acceptor record that this machine's supervisor made, or its first process."""
    generation = group.generation
    machine = group.machine
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
    voter: VotingMember, generation: Generation, member: Member, store: Store, limit: float
) -> None:
    deadline = monotonic() + limit
    line = voter.line
    connect_members(line, generation, member, store, limit)
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


class ElasticMembership:
    """Membership of a run that survives the loss of members.

    Args:
        voter: votes on the next generations.
        generation: the first generation.
        store: the store of the start, which the first generation uses.
        witness_machine: the machine of the run on which the witness is; None: it is on none.

    Attributes:
        survives: True.
        activities: what the members do in steps and between them.
        frames: the membership itself.
    """

    survives = True

    def __init__(
        self,
        voter: VotingMember,
        generation: Generation,
        store: Store,
        witness_machine: int | None = None,
    ) -> None:
        self._voter = voter
        self._generation = generation  # the newest that was decided
        self._entered: Generation | None = None
        self._store = store
        self._witness_machine = witness_machine
        self._votes = False
        self.activities = voter.activities
        self.frames = self

    def enter(self, group: Group, waits: InterruptibleGeneration) -> Store:
        """Return a generation's store, as `Membership.enter`; that of the first is the start's.

        Raises:
            CommError: a member didn't come, or the generation has ended before.
            IdleTimeout: a member works outside a step for too long.
        """
        generation = group.generation
        store = self._store
        if self._entered is not None:
            self._voter.await_members(group)
            store = self._voter.store_of(group)
        # Before the ranks connect: a member may be lost while the others still do.
        self._voter.waits.attach(generation, waits)
        self._entered = generation
        return store

    def begin(self, generation: Generation) -> str:
        """Vote from now on, as `Membership.begin`."""
        self._generation = generation
        self._entered = generation
        self._votes = True
        self._voter.begin(generation)
        return self._risk(generation)

    def next_generation(self, lost: CommError) -> Successor:
        """Wait for the decision about the next generation, as `Membership.next_generation`.

        What this member holds is in its machine's record already.

        Raises:
            OutsideWorld: this member isn't in it, there is none, or it has no state to start from.
            CommError: a member has ended well too early: no loss, but a mistake of the script.
        """
        change = self._voter.next_generation(self._generation, lost)
        if change.left:
            raise lost
        generation = self._generation = change.generation
        start = None
        if generation.start_token:
            token, _, step = generation.start_token.rpartition(":")
            start = SnapshotName(token, int(step))
        ids = [member.id for member in generation.members]
        return Successor(
            group=Group.world(generation, ids.index(self._voter.id)),
            start=start,
            lost=[member.id for member in change.lost],
            causes=[str(cause) for cause in change.causes],
            seconds=change.decided_at - change.detected_at,
            detected_at=change.detected_at,
            risk=self._risk(generation),
        )

    def poll(self, step: int) -> None:
        """Report that this member is in a step."""
        assert self._entered is not None
        self._voter.report_progress(self._entered, step)

    def acknowledge(self, held: Sequence[Held]) -> bool:
        """Record what this member holds, as `Membership.acknowledge`."""
        return self._voter.acknowledge(self._generation, tuple(held))

    def may_write(self, *, wait: bool) -> bool:
        """Return whether this member is in the world, as `Membership.may_write`."""
        if not self._votes:  # none is expelled
            return True
        return self._voter.may_write() if wait else self._voter.lease_lasts()

    def require_member(self) -> None:
        """Require that this member is in the world, as `Membership.require_member`."""
        if self._votes and self._entered is not None:
            self._voter.require_member(self._entered)

    def leave(self, failure: FailureReport | None = None) -> None:
        """Report this member's end, as `Membership.leave`.

        Without that, the others would take the end of its connections for a loss, and continue for
        as long as this process needs to end.
        """
        if failure is None:
            self._voter.leave()
        elif not failure.consequence:
            name = self._generation.name_of(self._voter.id)
            report = failure.by(str(name))
            self._voter.end_run(report.text, report.status)

    def end_with(self, signals: EndSignals) -> None:
        """Let a signal to this process end the run on all machines, and let others end this one."""
        signals.when_received(lambda number: self.leave(FailureReport.of_signal(number)))
        self._voter.when_end_is_asked(signals.stop)

    def send(
        self, peer: str, kind: str, body: Mapping[str, Any], bulk: bytes | list[memoryview] = b""
    ) -> None:
        """Send a frame to a member, as `Frames.send`."""
        self._voter.line.send(peer, kind, body, bulk)

    def broadcast(self, kind: str, body: Mapping[str, Any]) -> None:
        """Send a frame to all members, as `Frames.broadcast`."""
        members = [member.id for member in self._generation.members]
        self._voter.line.broadcast(kind, body, members)

    def handle(self, kind: str, handler: FrameHandler) -> None:
        """Let frames of a kind be handled, as `Frames.handle`."""
        self._voter.handle(kind, handler)

    def _risk(self, generation: Generation) -> str:
        several = len(generation.machines) > 1
        return _risk(generation, self._witness_machine) if several else ""


def _risk(generation: Generation, witness_machine: int | None) -> str:
    """Return a sentence about the machine whose loss would stop the run."""
    machine = indispensable_machine(generation, witness_machine)
    if machine is None:
        return "The run continues after the loss of any one of its machines."
    host = next(one.host for one in generation.members if one.machine == machine)
    why = "the witness is there"
    if not generation.witness:
        why = (
            f"it has the casting vote of {len(generation.machines)} machines, because there is no "
            "witness (a shared folder, Redis or etcd)"
        )
    return f"The loss of machine {machine} ({host}) would stop the run: {why}."
