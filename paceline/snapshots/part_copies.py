"""Copies of other members' parts of snapshots, in the order in which they were received."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.cluster.membership.snapshot_name import SnapshotName

Bytes = bytes | bytearray | memoryview


class PartCopies:
    """Copies of other members' parts, by snapshot and owner; the caller guards it by a lock."""

    def __init__(self) -> None:
        self._copies: dict[tuple[SnapshotName, str], Bytes] = {}  # the oldest first

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return sum(len(data) for data in self._copies.values())

    def add(self, name: SnapshotName, owner: str, data: Bytes) -> None:
        """Keep a copy, in place of an earlier one of the same part."""
        self._copies[name, owner] = data

    def remove(self, name: SnapshotName, owner: str) -> None:
        """Drop a copy, if there is one."""
        self._copies.pop((name, owner), None)

    def owners(self, name: SnapshotName) -> frozenset[str]:
        """Return the ids of the members whose part of a snapshot is here."""
        return frozenset(owner for each, owner in self._copies if each == name)

    def find(self, name: SnapshotName, owner: str) -> Bytes | None:
        """Return a copy, None if it isn't here."""
        return self._copies.get((name, owner))

    def superseded(self, name: SnapshotName, newer: str) -> list[tuple[SnapshotName, str]]:
        """List the copies that a committed snapshot supersedes.

        Those of its owners are superseded that were received before its own part; of other owners,
        those of other generations.

        Args:
            name: of the committed snapshot.
            newer: prefix of the names of the present generation's snapshots.
        """
        order = list(self._copies)
        found = []
        for place, (each, owner) in enumerate(order):
            if (name, owner) in self._copies:
                older = place < order.index((name, owner))
            else:
                older = each != name and not is_of(newer, each)
            if older:
                found.append((each, owner))
        return found

    def retain(self, names: Iterable[SnapshotName]) -> None:
        """Drop the copies of all other snapshots."""
        retained = set(names)
        for each in [each for each in self._copies if each[0] not in retained]:
            del self._copies[each]


def is_of(prefix: str, name: SnapshotName) -> bool:
    """Return whether a snapshot was taken in the generation with this key prefix."""
    return bool(prefix) and f"{name.token}/".startswith(f"{prefix}/")
