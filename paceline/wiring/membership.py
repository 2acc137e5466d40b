"""A worker's membership: its control line, its machine's record, the witness, the next generation.

each process     publish an address ── await those of all members ── connect ── begin
a lost peer      next_generation: the vote's outcome, as a successor for the step driver
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from signal import Signals
from socket import gethostbyname
from time import monotonic
from typing import Any

from torch._C._distributed_c10d import Store

from paceline.cluster.membership.acceptor_record import AcceptorRecord
from paceline.cluster.membership.control_line.frame_kinds import (
    control_secret,
    supervisor_key,
    supervisor_name,
)
from paceline.cluster.membership.evidence import EvidenceOptions
from paceline.cluster.membership.generation import Generation, Group, Member
from paceline.cluster.membership.generation_waits import Change, OutsideWorld
from paceline.cluster.membership.machine_acceptor import MachineAcceptor
from paceline.cluster.membership.membership import Membership
from paceline.cluster.membership.voting.messages import Held
from paceline.cluster.membership.voting.successor import indispensable_machine
from paceline.cluster.membership.witness import Witness
from paceline.cluster.stores.failure_report import FailureReport
from paceline.cluster.stores.polled_store import PolledStore
from paceline.cluster.stores.waiting import await_keys
from paceline.cluster.supervision.stop_signals import StopSignals
from paceline.cluster.supervision.supervisor import print_message
from paceline.comm.peer_activities import PeerActivities
from paceline.errors import CheckpointError, CommError, Message, many
from paceline.generation.context import GenerationContext
from paceline.generation.run import Run
from paceline.run.backup.backup_channel import HeldParts
from paceline.run.backup.snapshot_backup import SnapshotBackup
from paceline.run.recovery.recovery import Successor
from paceline.state.checkpoint_files import FOLDER
from paceline.state.checkpoint_writer import Checkpoint
from paceline.state.file_integrity import contents_id
from paceline.state.snapshots import SnapshotName
from paceline.wiring.peer_line import connect_members

_BACKUP = "backup"
_CONFIRMED = "confirmed"
_DURABLE = "durable"


def join_membership(
    group: Group,
    store: Store,
    *,
    options: EvidenceOptions,
    limit: float,
    report: Callable[[Message], object] = print_message,
) -> tuple[Group, MemberLink | None]:
    """Connect a process's control line with those of all members; collective.

    Args:
        group: all ranks of the first generation, as this one sees them.
        store: the store of the start.
        options: limits of silence.
        limit: seconds to wait for the other members.
        report: prints a line.

    Returns:
        the group, whose generation names the witness if there is one; and the link to the
        membership, None in a world of one rank.

    Raises:
        CommError: a member didn't come in time, or can't be reached.
    """
    if group.size == 1:
        return group, None
    key = f"{group.generation.key_prefix}/witness"
    nonce = Witness.create(store, key=key)
    group = replace(group, generation=replace(group.generation, witness=nonce))
    generation = group.generation
    member = group.member
    membership = Membership(
        generation,
        member,
        secret=control_secret(generation),
        acceptor=MachineAcceptor(_open_record(group, store, limit), member.machine),
        witness=Witness(store, nonce, key=key) if nonce else None,
        options=options,
        report=report,
    )
    try:
        _connect(membership, generation, member, store, limit)
    except BaseException:
        membership.close()
        raise
    return group, MemberLink(membership, generation, _witness_machine(generation, store))


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
    membership: Membership, generation: Generation, member: Member, store: Store, limit: float
) -> None:
    deadline = monotonic() + limit
    line = membership.line
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


class MemberLink:
    """Link of a run to its membership: backups, held snapshots, and the next generation.

    Args:
        membership: the membership.
        generation: the first generation.
        witness_machine: the machine of the run on which the witness is; None: it is on none.

    Attributes:
        backup: sends what this rank alone has to its backup holder.
    """

    def __init__(
        self, membership: Membership, generation: Generation, witness_machine: int | None
    ) -> None:
        self._membership = membership
        self._generation = generation
        self._witness_machine = witness_machine
        self._run: Run | None = None
        self._folder: Path | None = None
        self._durable: tuple[Held, ...] = ()  # the newest checkpoints that this member can read
        self.backup = SnapshotBackup(self, self._record_held)
        membership.handle(_BACKUP, self._receive)
        membership.handle(_CONFIRMED, self._confirm)
        membership.handle(_DURABLE, self._note_written)

    def begin(self, run: Run, folder: Path | None) -> None:
        """Take part in votes from now on; the run's first generation has its number.

        Args:
            run: the run.
            folder: its folder on this machine; None: it saves no checkpoints.
        """
        self._folder = folder
        self._run = run
        self._generation = run.context.world.generation
        self._membership.begin(self._generation)
        run.may_write = self._membership.may_write
        run.lease_lasts = self._membership.lease_lasts
        run.report_progress = lambda step: self._membership.report_progress(
            run.context.world.generation, step
        )
        run.require_member = lambda: self._membership.require_member(run.context.world.generation)
        run.when_entered(self._report_risk)
        self._report_risk()

    def attach(self, context: GenerationContext) -> None:
        """Let the loss of a member interrupt a context's waits."""

        def interrupt() -> None:
            context.interrupt()
            self.backup.interrupt()

        self._membership.attach(context.world.generation, interrupt)

    @property
    def activities(self) -> PeerActivities:
        """What the members do in steps and between them."""
        return self._membership.activities

    def await_members(self, group: Group) -> None:
        """Wait until all members of a later generation have come to enter it; collective.

        Raises:
            CommError: a member didn't come, or the generation has ended before.
            IdleTimeout: a member works outside a step for too long.
        """
        self._membership.await_members(group)

    def store_of(self, group: Group) -> Store:
        """Return the store of a later generation."""
        return self._membership.store_of(group)

    def next_generation(self, error: CommError, held: Sequence[SnapshotName]) -> Successor:
        """Wait for the decision about the next generation, and report it.

        Raises:
            OutsideWorld: this member isn't in it, there is none, or it has no state to start from.
            CommError: a member has ended well too early: no loss, but a mistake of the script.
        """
        assert self._run is not None
        change = self._membership.next_generation(self._generation, error)
        if change.left:
            raise error
        generation = self._generation = change.generation
        durable = not generation.start_token
        reasons = _reasons(change)
        if durable:
            reasons += (
                ". With that, all copies of a part of the state are lost, and no snapshot in "
                "memory is whole"
            )
        if durable and self._folder is None:
            sentence = f"{reasons}. The run has no run folder, and so no checkpoint."
            if generation.leader.id == self._membership.id:
                print_message(sentence)  # the supervisor reports the first loss alone
            outside = OutsideWorld(sentence)
            outside.remedy = (
                "Start it again, with a run folder if it is to resume after such a loss."
            )
            raise outside
        ids = [member.id for member in generation.members]
        group = Group.world(generation, ids.index(self._membership.id))
        waited = change.decided_at - change.detected_at
        self._run.recorder.event(
            "change",
            generation=generation.number,
            members=ids,
            lost=[member.id for member in change.lost],
            causes=[str(cause) for cause in change.causes],
            start=generation.start,
            seconds=waited,
            detected_at=change.detected_at,
        )
        if group.rank == 0:
            size = many(group.size, "process")
            start = generation.start
            verb = "continues" if group.size == 1 else "continue"
            state = "the durable state of step" if durable else "step"
            print_message(
                f"{reasons}. {size} {verb} from {state} {start:,} as generation "
                f"{generation.number}, decided after {waited:.2f} s."
            )
        if durable:
            return Successor(group=group, start=None, detected_at=change.detected_at)
        token, _, step = generation.start_token.rpartition(":")
        start_name = SnapshotName(token, int(step))
        return Successor(group=group, start=start_name, detected_at=change.detected_at)

    def announce(self, checkpoint: Checkpoint, path: Path) -> None:
        """Report to all members that a checkpoint is on this machine's disk; from any thread."""
        (*_, (generation, _)) = checkpoint.state["lineage"]
        token = f"{checkpoint.name.token}:{checkpoint.name.step}"
        held = Held(generation=generation, token=token, step=checkpoint.step, durable=True)
        try:
            contents = contents_id(path)
        except (CheckpointError, OSError):
            if path.exists():
                raise
            return  # the next leader has removed it: this process was stopped meanwhile
        self._note_durable(held)
        self._membership.line.broadcast(
            _DURABLE,
            {
                "generation": generation,
                "token": token,
                "step": held.step,
                "file": path.name,
                "contents": contents,
            },
            [member.id for member in self._generation.members],
        )

    def end_with(self, signals: StopSignals) -> None:
        """Let a signal to this process end the run on all machines, and let others end this one."""

        def report(number: Signals) -> None:
            name = self._generation.name_of(self._membership.id)
            self._membership.end_run(f"{name}: stopped by {number.name}.", 128 + number)

        signals.when_received(report)
        self._membership.when_end_is_asked(signals.stop)

    def fail(self, error: BaseException) -> None:
        """Let an error of this process that the others don't survive end the run on all machines.

        Without that, they would take the end of its connections for a loss, and continue for as
        long as this process needs to end.
        """
        failure = FailureReport.of(error)
        if not failure.consequence:
            name = self._generation.name_of(self._membership.id)
            self._membership.end_run(f"{name}: {failure.text}", failure.status)

    def _report_risk(self) -> None:
        """Report which machine's loss would stop the run, where it has several."""
        generation = self._generation
        if self._run is not None and len(generation.machines) > 1:
            text = _risk(generation, self._witness_machine)
            self._run.recorder.event("note", text=text)

    def leave(self) -> None:
        """Report that this member ends well."""
        self._membership.leave()

    def close(self) -> None:
        """End the backups and the membership."""
        self.backup.interrupt()
        self.backup.close()
        self._membership.close()

    def send(
        self, holder: str, name: SnapshotName, owner: str, chunks: Sequence[memoryview]
    ) -> None:
        """Send a part to its backup holder, as `BackupChannel` does."""
        body: dict[str, Any] = {"token": name.token, "step": name.step, "owner": owner}
        self._membership.line.send(holder, _BACKUP, body, b"".join(chunks))

    def _receive(self, peer: str, body: Mapping[str, Any], data: bytes | bytearray) -> None:
        name = SnapshotName(body["token"], body["step"])
        if self.backup.receive(name, body["owner"], data):
            confirmed: dict[str, Any] = {"token": name.token, "step": name.step}
            self._membership.line.send(peer, _CONFIRMED, confirmed)

    def _confirm(self, peer: str, body: Mapping[str, Any], data: bytes | bytearray) -> None:
        self.backup.confirm(SnapshotName(body["token"], body["step"]))

    def _note_written(self, peer: str, body: Mapping[str, Any], data: bytes | bytearray) -> None:
        """Note a checkpoint that another member has written, if this machine has the file, too."""
        if self._folder is None:
            return
        with suppress(CheckpointError, OSError):
            path = self._folder / FOLDER / Path(body["file"]).name
            if contents_id(path) == body["contents"]:
                generation = body["generation"]
                token = body["token"]
                step = body["step"]
                self._note_durable(
                    Held(generation=generation, token=token, step=step, durable=True)
                )

    def _note_durable(self, held: Held) -> None:
        """Record a checkpoint; the one before it counts where this one turns out to be void."""
        self._durable = (*self._durable, held)[-2:]
        self.backup.record()

    def _record_held(self, held: Mapping[SnapshotName, HeldParts]) -> bool:
        """Record what is held in the machine's acceptor record, as `RecordHeld` does."""
        records = tuple(
            Held(
                generation=name.token.split("/")[1],
                token=f"{name.token}:{name.step}",
                step=each.completed,
                parts=tuple(sorted(each.parts)),
                members=len(each.whole),
                complete=each.complete,
            )
            for name, each in held.items()
        )
        return self._membership.acknowledge(self._generation, (*records, *self._durable))


def _reasons(change: Change) -> str:
    """Return why members were lost, without the stop."""
    reasons = "; ".join(str(cause).rstrip(".") for cause in change.causes if cause)
    return reasons or "A connection between members was lost"


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
