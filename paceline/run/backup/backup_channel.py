"""What a member's backups need of its membership: a channel to the holder, and its held record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.state.snapshots import SnapshotName


@dataclass(frozen=True, kw_only=True)
class HeldParts:
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
    complete: bool = False


class BackupChannel(Protocol):
    """Protocol of what carries parts to backup holders, and their confirmations back.

    On the holder it calls `SnapshotBackup.receive`, and sends a confirmation if that returns True;
    back at the owner it calls `SnapshotBackup.confirm`. Parts of one owner are received in order.
    """

    def send(
        self, holder: str, name: SnapshotName, owner: str, chunks: Sequence[memoryview]
    ) -> None:
        """Send a part; called by the backup's thread, one part at a time; may block.

        A part that can't be sent is dropped: its snapshot then isn't acknowledged.

        Args:
            holder: the backup holder's id.
            name: of the snapshot.
            owner: this member's id.
            chunks: to be joined; they stay as they are until the part is confirmed, or this member
                leaves the generation.
        """


class RecordHeld(Protocol):
    """Protocol of the record in which votes find what a member holds."""

    def __call__(self, held: Mapping[SnapshotName, HeldParts]) -> bool:
        """Replace what is recorded for this member, unless its machine has promised.

        It returns soon, and doesn't call the backup. The main thread calls it, and the thread that
        receives parts.

        Returns:
            False where the machine has promised to end the generation: nothing was changed, and the
            caller neither acknowledges nor drops anything.
        """
