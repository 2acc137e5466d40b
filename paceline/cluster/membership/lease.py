"""Who is alive: a lease is a counter in the store that its owner advances.

Clocks of different machines are never compared. A reader watches the counter on its own clock:
a process that advances it is alive, one that does not within the limit is dead, and before either
was seen nothing is known. On the same machine the kernel knows at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self

from paceline.cluster.membership.process_identity import ProcessIdentity, ask_kernel

BEAT_S = 0.5
ENDED = "ended"
"""The counter of an owner that gave its lease up before the world stood."""


@dataclass(frozen=True, kw_only=True)
class LeaseOptions:
    """How a lease is judged.

    Attributes:
        limit: seconds without an advance after which the owner counts as dead; several beats, as
            a shared folder may be slow to show them.
    """

    limit: float = 10 * BEAT_S


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What one reader has seen of one lease.

    Attributes:
        counter: its last value read; None where there was none.
        since: when, on the reader's clock (seconds), the reader first saw this value.
        advanced: whether the value changed while the reader watched.
        process: what the kernel says of the owner's process.
    """

    counter: bytes | None
    since: float
    advanced: bool
    process: Literal["runs", "ended", "elsewhere"]

    @classmethod
    def first(
        cls, who: ProcessIdentity, here: ProcessIdentity, counter: bytes | None, now: float
    ) -> Self:
        """Begin to watch."""
        return cls(counter=counter, since=now, advanced=False, process=ask_kernel(who, here))

    def then(
        self, who: ProcessIdentity, here: ProcessIdentity, counter: bytes | None, now: float
    ) -> Self:
        """Look again."""
        process = ask_kernel(who, here)
        if counter == self.counter:
            return replace(self, process=process)
        return replace(self, counter=counter, since=now, advanced=True, process=process)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A judgement and its reason, in words."""

    state: Literal["alive", "dead", "unknown"]
    reason: str


def judge(seen: Observation, now: float, options: LeaseOptions) -> Verdict:
    """Tell whether a lease's owner is alive.

    Args:
        seen: what the reader has seen until now.
        now: the reader's clock, in seconds.
        options: the limit.
    """
    if seen.counter == ENDED.encode():
        return Verdict(state="dead", reason="it gave up")
    if seen.process == "ended":
        return Verdict(state="dead", reason="its process on this machine has ended")
    if seen.process == "runs":
        return Verdict(state="alive", reason="its process runs on this machine")
    age = now - seen.since
    if age > options.limit:
        return Verdict(state="dead", reason=f"its lease has stood still for {age:.1f} s")
    if seen.advanced:
        return Verdict(state="alive", reason=f"its lease advanced {age:.1f} s ago")
    return Verdict(state="unknown", reason=f"its lease has been watched for {age:.1f} s only")
