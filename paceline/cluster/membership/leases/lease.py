"""Who is alive: a lease is a counter in the store that its owner advances.

Clocks of different machines are never compared. A reader watches the counter on its own clock:
a process that advances it is alive, and one that does not within the limit is dead. Until the
reader has seen either, the verdict is unknown. On the same machine the kernel knows at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BEAT_S = 0.5
LIMIT_S = 10 * BEAT_S
"""Seconds without an advance after which the owner counts as dead; several beats, as a shared
folder may be slow to show them."""

ENDED = "ended"
"""The counter of an owner that gave its lease up before the world was complete."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Verdict on a lease: its state, and the reason in words."""

    state: Literal["alive", "dead", "unknown"]
    reason: str


def judge(
    counter: bytes | None,
    process: Literal["runs", "ended", "elsewhere"],
    age: float,
    *,
    advanced: bool,
) -> Verdict:
    """Return whether a lease's owner is alive.

    Args:
        counter: the lease's value; None where there is none.
        process: what the kernel says of the owner's process.
        age: seconds since the reader first saw this value.
        advanced: whether the value changed while the reader watched.
    """
    if counter == ENDED.encode():
        return Verdict(state="dead", reason="it gave up")
    if process == "ended":
        return Verdict(state="dead", reason="its process on this machine has ended")
    if process == "runs":
        return Verdict(state="alive", reason="its process runs on this machine")
    if age > LIMIT_S:
        return Verdict(state="dead", reason=f"its lease has not advanced for {age:.1f} s")
    if advanced:
        return Verdict(state="alive", reason=f"its lease advanced {age:.1f} s ago")
    return Verdict(state="unknown", reason=f"its lease has been watched for {age:.1f} s only")
