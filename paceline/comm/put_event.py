"""When a put had left, or its notification came: what a window remembers for a trace."""

from __future__ import annotations

from typing import NamedTuple


class PutEvent(NamedTuple):
    """A moment of a put.

    Attributes:
        arrived: the peer's notification has come here; otherwise the put to it has left.
        peer: the other rank.
        notification, value: the put's.
        at: nanoseconds of the system's monotonic clock.
    """

    arrived: bool
    peer: int
    notification: int
    value: int
    at: int
