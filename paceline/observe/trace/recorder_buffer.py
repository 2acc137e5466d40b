"""What one rank did in the traced steps, and how it travels to rank 0."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


class Span(NamedTuple):
    """Traced interval of one thread, in nanoseconds of the rank's clock."""

    name: str
    thread: str
    start: int
    stop: int
    fields: Mapping[str, Any]


class TracedPut(NamedTuple):
    """Traced departure of a put, or arrival of its notification.

    Attributes:
        window: which of the ranks' windows.
        arrived: it has come from the peer; otherwise it has left for it.
        peer: the other rank.
        notification, value: the put's.
        at: by the rank's clock, in nanoseconds.
    """

    window: int
    arrived: bool
    peer: int
    notification: int
    value: int
    at: int


@dataclass(frozen=True, kw_only=True)
class RecorderBuffer:
    """Trace buffer of one rank.

    Attributes:
        rank, machine: of the process that recorded it.
        system: the running system, whose clock the times are of.
        spans: the spans; those of each thread are in the order of their ends.
        moments: in their order.
        names: of each window, what its notifications announce.
        buckets: of each bucket, its parameters' names.
    """

    rank: int
    machine: int
    system: str
    spans: Sequence[Span]
    moments: Sequence[TracedPut]
    names: Mapping[int, Sequence[str]]
    buckets: Sequence[Sequence[str]]

    def to_bytes(self) -> bytes:
        """Write it for another rank to read."""
        return zlib.compress(json.dumps(asdict(self), default=list).encode())

    @classmethod
    def from_bytes(cls, data: bytes) -> RecorderBuffer:
        """Read what `to_bytes` wrote."""
        fields = json.loads(zlib.decompress(data))
        fields["spans"] = [Span(*span) for span in fields["spans"]]
        fields["moments"] = [TracedPut(*moment) for moment in fields["moments"]]
        fields["names"] = {int(window): names for window, names in fields["names"].items()}
        return cls(**fields)
