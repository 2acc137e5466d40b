"""Interval between in-memory snapshots: a snapshot in every S-th step, chosen by measurement.

    S = the smallest integer with  cost / (S · step) < 0.9%,  at most `MAX_STEPS`

`cost` is the median time of a snapshot's copies, and `step` the median time of a step without them.
Until a first interval is known, each step is due; a later measurement uses the snapshots of the
present interval. The first two snapshots don't count, because they allocate memory.
"""

from __future__ import annotations

from statistics import median

MAX_STEPS = 1_000  # that a run repeats after it has lost a rank
_COST = 0.009  # of the time; what is promised is 1%, and some copies take longer
_SKIPPED = 2  # of a generation's snapshots: the first are slower
_COUNTED = 5


class SnapshotInterval:
    """Interval between snapshots; ranks use the same one, of rank 0.

    Args:
        steps: the interval, in steps; 0: it is measured.

    Attributes:
        steps: the interval in use, in steps; 0 before one was measured.
        measuring: whether one is being measured.
    """

    def __init__(self, steps: int = 0) -> None:
        self.steps = steps
        self.restart(measuring=not steps)

    def restart(self, *, measuring: bool = True) -> None:
        """Measure anew from here on: steps take another time now."""
        self.measuring = measuring
        self._skipped = 0
        self._copies: list[float] = []  # seconds of each snapshot
        self._plain: list[float] = []  # seconds of each step, without those of a snapshot

    def step_is_due(self, number: int) -> bool:
        """Return whether a snapshot of the state before step `number` is due."""
        return not self.steps or number % self.steps == 0

    def measure(self, step: float, copies: float = 0.0) -> None:
        """Take the times of a step, in seconds.

        Args:
            step: the whole step's, the copies' included.
            copies: that of the copies; 0 where no snapshot was taken.
        """
        if self._skipped < _SKIPPED:
            # Steps count from the same moment as copies do: both medians are of the same stretch.
            self._skipped += copies > 0
        else:
            self._plain.append(step - copies)
            self._copies += [copies] if copies else []

    def choice(self) -> int:
        """Return the measured interval, in steps; 0 as long as too few snapshots were taken."""
        if not self.measuring or len(self._copies) < _COUNTED:
            return 0
        cost = median(self._copies)
        step = median(self._plain)
        cheap = (steps for steps in range(1, MAX_STEPS) if cost < _COST * step * steps)
        return next(cheap, MAX_STEPS)
