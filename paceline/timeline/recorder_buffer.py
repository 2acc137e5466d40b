"""Buffer of one rank's spans and puts in the traced steps, and how rank 0 gets it."""

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
    """Trace event of one put: when it was sent, or when its notification arrived.

    Attributes:
        window: the number of the window, the same on all ranks.
        arrived: True: the peer's notification arrived; False: the put to the peer was sent.
        peer: the other rank.
        notification, value: the notification's number and value.
        at: the time, in nanoseconds of the rank's clock.
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
        rank, machine: rank and machine number of the process that recorded the trace.
        system: identifier of the running system (boot) whose clock gave the times.
        spans: the spans; those of one thread are in the order in which they ended.
        moments: the traced puts, in the order of their times.
        names: for each window, what each of its notifications announces.
        buckets: for each bucket, the names of its parameters.
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
