"""Comparisons that a noisy machine can't fake: interleaved rounds and ratios inside a round.

Whatever slows the machine for a while slows all contenders of a round, so it leaves their ratios
alone. The median ratio is given with an interval: two that differ by less are not different.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Interval:
    """A median and where it lies with 95 % confidence, by 10,000 bootstrap samples."""

    median: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the interval's width, as a share of the median."""
        return (self.high - self.low) / 2 / self.median

    def __str__(self) -> str:
        return format(self)

    def __format__(self, form: str) -> str:
        form = form or ".2f"
        return f"{self.median:{form}} ({self.low:{form}} to {self.high:{form}})"


def interleaved(
    contenders: Mapping[str, Callable[[], float]], rounds: int
) -> dict[str, list[float]]:
    """Run each contender once a round, in turns at who begins.

    Returns:
        What they return, a value a round.
    """
    names = list(contenders)
    results: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in rotated(names, number):
            results[name].append(contenders[name]())
    return results


def rotated(names: Sequence[str], number: int) -> list[str]:
    """Return the order of a round: each time another one begins."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def paired_ratio(above: Sequence[float], below: Sequence[float]) -> Interval:
    """Divide round by round, and take the median."""
    return median_of(np.divide(above, below).tolist())


def median_of(values: Sequence[float]) -> Interval:
    """Take the median of a value a round."""
    draws = np.random.default_rng(0).choice(values, size=(10_000, len(values)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return Interval(float(np.median(values)), float(low), float(high))
