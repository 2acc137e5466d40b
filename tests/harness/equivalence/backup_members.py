"""Members whose backups reach each other in this process, and the records of what they hold.

A member's record refuses changes once it has promised, until the next generation begins, as that of
a machine does in a vote. A lost member receives nothing and confirms nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch._C._distributed_c10d import Store

from paceline.cluster.membership.protocol import FrameHandler
from paceline.cluster.membership.snapshot_name import SnapshotName
from paceline.cluster.membership.voting.messages import Held
from paceline.snapshots.backup import SnapshotBackup
from tests.harness.membership.given_membership import GivenMembership


class HeldParts(NamedTuple):
    """Parts that a member has of a snapshot that it holds.

    Attributes:
        parts: ids of the members whose part it has: its own id, and those of its copies.
        whole: ids of all members whose parts make up the snapshot.
        completed: the number of completed steps in it; smaller than the step in its name where a
            step trains several batches.
        complete: whether it needs no other member's part.
    """

    parts: frozenset[str]
    whole: frozenset[str]
    completed: int
    complete: bool


class BackedUpMembership(GivenMembership):
    """Membership of one member, with its record and the frames that it receives.

    Attributes:
        backup: the member's backup; set by the owner.
        held: what was recorded last.
        promised: whether nothing may be recorded any more.
        handlers: of frames, by their kinds.
    """

    def __init__(
        self, members: BackupMembers, member: str, store: Store | None = None, **answers: Any
    ) -> None:
        super().__init__(store, **answers)
        self._members, self._member = members, member
        self._lock = threading.Lock()
        self.backup: SnapshotBackup | None = None
        self.held: Mapping[SnapshotName, HeldParts] = {}
        self.promised = False
        self.handlers: dict[str, FrameHandler] = {}

    def acknowledge(self, held: Sequence[Held]) -> bool:
        with self._lock:
            if not self.promised:
                self.held = dict(map(self._entry, (one for one in held if not one.durable)))
            return not self.promised

    def promise(self) -> Mapping[SnapshotName, HeldParts]:
        """Record nothing from now on; return what is recorded."""
        with self._lock:
            self.promised = True
            return self.held

    def send(
        self, peer: str, kind: str, body: Mapping[str, Any], bulk: bytes | list[memoryview] = b""
    ) -> None:
        self._members.send(
            self._member, peer, kind, body, bulk if isinstance(bulk, bytes) else b"".join(bulk)
        )

    def broadcast(self, kind: str, body: Mapping[str, Any]) -> None:
        self._members.broadcast(kind, body)

    def handle(self, kind: str, handler: FrameHandler) -> None:
        self.handlers[kind] = handler

    def _entry(self, held: Held) -> tuple[SnapshotName, HeldParts]:
        assert self.backup is not None
        token, _, step = held.token.rpartition(":")
        name = SnapshotName(token, int(step))
        parts = HeldParts(
            parts=frozenset(held.parts),
            whole=self.backup._own[name].whole,  # of which the record has the number
            completed=held.step,
            complete=held.complete,
        )
        assert len(parts.whole) == held.members
        return name, parts


@dataclass
class BackupMembers:
    """Members, by their ids: their records and their backups; the frames between them.

    Attributes:
        lost: ids of members that receive nothing any more.
        open: parts are delivered while this is set.
        records: the members' memberships, which have their records.
        backups: the members' own.
        delivered: the bytes of each part that was sent.
        confirmations: the number of parts that holders have confirmed.
        withheld: returns whether a member's part of a snapshot is lost on its way.
        prompt: whether all other parts arrive before a vote begins.
        announced: called with what all members learn of a checkpoint.
    """

    lost: set[str] = field(default_factory=set)
    open: threading.Event = field(default_factory=threading.Event)
    records: dict[str, BackedUpMembership] = field(default_factory=dict)
    backups: dict[str, SnapshotBackup] = field(default_factory=dict)
    delivered: list[int] = field(default_factory=list)
    confirmations: int = 0
    withheld: Callable[[SnapshotName, str], bool] = lambda name, owner: False
    prompt: bool = False
    announced: Callable[[Mapping[str, Any]], None] = lambda body: None

    def __post_init__(self) -> None:
        self.open.set()

    def enter(self, member: str, store: Store, **answers: Any) -> BackedUpMembership:
        """Return a new member's membership."""
        self.records[member] = BackedUpMembership(self, member, store, **answers)
        return self.records[member]

    def join(self, member: str) -> SnapshotBackup:
        """Return a new member's backup."""
        self.records[member] = membership = BackedUpMembership(self, member)
        self.backups[member] = membership.backup = SnapshotBackup(membership)
        return self.backups[member]

    def send(self, sender: str, peer: str, kind: str, body: Mapping[str, Any], bulk: bytes) -> None:
        """Deliver a frame: a part to its holder, or the confirmation to its owner."""
        if kind == "backup":
            assert self.open.wait(30)
            if self.withheld(SnapshotName(body["token"], body["step"]), body["owner"]):
                return
            self.delivered.append(len(bulk))
        elif kind == "confirmed":
            self.confirmations += 1
        if peer not in self.lost:
            self.records[peer].handlers[kind].receive(sender, kind, body, bulk)

    def broadcast(self, kind: str, body: Mapping[str, Any]) -> None:
        """Let all members learn of a checkpoint."""
        assert kind == "durable"
        self.announced(body)

    def close(self) -> None:
        """End the members' threads."""
        self.open.set()
        for backup in self.backups.values():
            backup.close()
