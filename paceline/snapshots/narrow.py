"""Narrow parameters in snapshots: their masters alone, of which they are rounded anew.

    replica             p (16 bits), its masters (float32) in parts, one a rank
    snapshot            the masters, in the ranks' own state
    next generation     p = round(masters), exchanged by the ranks (`Masters.round`)

A script may have written to p since the last update. The masters take that first, so that they are
what p was made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.cluster.membership.snapshot_name import SnapshotName
from paceline.reduce.rank_state import Masters
from paceline.replica.state_parts import PARAMETERS, REQUIRES_GRAD
from paceline.snapshots.copier import Receiver

_State = Mapping[str, Mapping[Any, Any]]


class WithoutNarrow:
    """Receiver of a snapshot: passes on all but narrow parameters.

    Args:
        receiver: gets the rest.
        masters: the ranks' masters.
    """

    def __init__(self, receiver: Receiver, masters: Masters) -> None:
        self._receiver = receiver
        self._masters = masters
        self.open = receiver.open
        self.hold = receiver.hold

    def add(self, name: SnapshotName, parts: _State) -> None:
        """Pass on the values of parts, and let the masters take those of narrow parameters."""
        narrow = self._masters.parameters
        values = parts.get(PARAMETERS, {})
        for p in values.values():
            if p in narrow:
                self._masters.renew(p)
        rest = {key: p for key, p in values.items() if p not in narrow}
        self._receiver.add(name, {**parts, **({PARAMETERS: rest} if values else {})})


def left_out(state: _State) -> set[str]:
    """Return the names of the narrow parameters that a snapshot doesn't have."""
    return state[REQUIRES_GRAD].keys() - state[PARAMETERS].keys()
