"""Random pauses, by which processes that try the same don't try again at the same moment."""

from __future__ import annotations

from random import SystemRandom

_RANDOM = SystemRandom()  # a script's seed would give all processes the same pauses


def jitter(low: float, high: float) -> float:
    """Return a random number between two, which no seed determines."""
    return _RANDOM.uniform(low, high)
