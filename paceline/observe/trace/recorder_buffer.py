"""What one rank did in the traced steps, and how it travels to rank 0."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


class Span(NamedTuple):
    """A stretch of a thread's time, by the rank's clock, in nanoseconds."""

    name: str
    thread: str
    start: int
    stop: int
    fields: Mapping[str, Any]


class TracedPut(NamedTuple):
    """A put has left, or its notification has come.

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
    """A rank's.

    Attributes:
        rank, machine: whose.
        system: the running system, whose clock it is.
        spans: in the order of their ends, a thread.
        moments: in their order.
        names: of each window, what its notifications tell of.
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
        told = json.loads(zlib.decompress(data))
        told["spans"] = [Span(*span) for span in told["spans"]]
        told["moments"] = [TracedPut(*moment) for moment in told["moments"]]
        told["names"] = {int(window): names for window, names in told["names"].items()}
        return cls(**told)
