"""Which parts of a snapshot no process has any more."""

from __future__ import annotations

from collections.abc import Collection, Iterable


def missing_parts(members: Iterable[str], held: Iterable[Collection[str]]) -> tuple[str, ...]:
    """Return the members whose part of a snapshot no process has any more, in the given order.

    Args:
        members: ids of all members whose parts make up the snapshot.
        held: for each process that is still there, the ids of the members whose part it has.
    """
    found = {member for parts in held for member in parts}
    return tuple(member for member in members if member not in found)
