"""Name of a snapshot, by which members agree on where the next generation starts."""

from __future__ import annotations

from typing import NamedTuple


class SnapshotName(NamedTuple):
    """Name of a snapshot, the same on all ranks.

    Attributes:
        token: what distinguishes it from other snapshots before the same step: the generation's key
            prefix, and a count where it was taken between two steps.
        step: number of the step before which the state was copied.
    """

    token: str
    step: int
