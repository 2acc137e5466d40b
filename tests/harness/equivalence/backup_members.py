"""Members whose backups reach each other in this process, and the records of what they hold.

A member's record refuses changes once it has promised, until the next generation begins, as that of
a machine does in a vote. A lost member receives nothing and confirms nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.run.backup.backup_channel import HeldParts

from paceline.cluster.membership.snapshot_name import SnapshotName
from paceline.run.backup.snapshot_backup import SnapshotBackup


class HeldRecord:
    """Record of what one member holds.

    Attributes:
        held: what was recorded last.
        promised: whether nothing may be recorded any more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.held: Mapping[SnapshotName, HeldParts] = {}
        self.promised = False

    def __call__(self, held: Mapping[SnapshotName, HeldParts]) -> bool:
        with self._lock:
            if not self.promised:
                self.held = dict(held)
            return not self.promised

    def promise(self) -> Mapping[SnapshotName, HeldParts]:
        """Record nothing from now on; return what is recorded."""
        with self._lock:
            self.promised = True
            return self.held


@dataclass
class BackupMembers:
    """Members, by their ids: their records and their backups; a channel between them.

    Attributes:
        lost: ids of members that receive nothing any more.
        open: parts are delivered while this is set.
        records: of what each member holds.
        backups: the members' own.
        delivered: the bytes of each part that was sent.
        withheld: returns whether a member's part of a snapshot is lost on its way.
        prompt: whether all other parts arrive before a vote begins.
    """

    lost: set[str] = field(default_factory=set)
    open: threading.Event = field(default_factory=threading.Event)
    records: dict[str, HeldRecord] = field(default_factory=dict)
    backups: dict[str, SnapshotBackup] = field(default_factory=dict)
    delivered: list[int] = field(default_factory=list)
    withheld: Callable[[SnapshotName, str], bool] = lambda name, owner: False
    prompt: bool = False

    def __post_init__(self) -> None:
        self.open.set()

    def join(self, member: str) -> SnapshotBackup:
        """Return a new member's backup."""
        self.records[member] = HeldRecord()
        self.backups[member] = SnapshotBackup(self, self.records[member])
        return self.backups[member]

    def send(
        self, holder: str, name: SnapshotName, owner: str, chunks: Sequence[memoryview]
    ) -> None:
        """Deliver a part to its holder, and the confirmation to its owner."""
        assert self.open.wait(30)
        if self.withheld(name, owner):
            return
        data = b"".join(chunks)
        self.delivered.append(len(data))
        if holder not in self.lost and self.backups[holder].receive(name, owner, data):
            self.backups[owner].confirm(name)

    def close(self) -> None:
        """End the members' threads."""
        self.open.set()
        for backup in self.backups.values():
            backup.close()
