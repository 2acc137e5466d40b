"""Round schedule: after which steps which fragment is merged, and when the result is applied.

A round is H steps. In a round each of the P fragments is taken once, staggered so that the link
carries an even stream (Streaming DiLoCo, arXiv 2501.18512): fragment p is taken after the step
whose number in the round, from 1, is (p + 1) * H / P, rounded up. The merge travels while the next
`delay` steps run, and is applied before the step that follows them:

    H = 6, P = 2, delay = 1

    step        0   1   2   3   4   5   6   7   8
    number      1   2   3   4   5   6   1   2   3
    taken                0           1           0
    applied                   0           1           0

H may be a schedule, a list of (first step, H): a phase each. A round that the end of its phase, or
of the run, cuts short ends there: after the last step all fragments are taken, and applied at once.
A merge still under way is applied before that last step, so a fragment has at most one merge under
way. In a phase the delay is at most H - 1.

Steps are numbered from 0. Everything here is a pure function, equal on all workers.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from paceline.config.average import Every, phases_of


@dataclass(frozen=True)
class _Phase:
    """Steps `first` to `end` - 1, merged every `every` steps; `end` None: as long as the run."""

    first: int
    end: int | None
    every: int

    def number(self, step: int) -> int:
        """Return the number of a step in its round, 1 to H."""
        return (step - self.first) % self.every + 1


class RoundSchedule:
    """Round schedule of `--sync average`.

    Args:
        every: H, the steps of a round; or phases ((first step, H), …), or their text "1@0,50@1000".
        fragments: P, the number of fragments.
        delay: steps from taking a fragment to applying its merge.
        steps: the run's number of steps, if it is known; after the last one all are merged.

    Raises:
        ConfigError: `every` isn't such a schedule.
    """

    def __init__(
        self, every: Every, fragments: int = 1, delay: int = 0, steps: int | None = None
    ) -> None:
        phases = phases_of(every)
        if steps is not None:
            phases = tuple(phase for phase in phases if phase[0] < max(1, steps))
        ends = [first for first, _ in phases[1:]]
        self._phases = [
            _Phase(first, end, h) for (first, h), end in zip(phases, [*ends, steps], strict=True)
        ]
        self._firsts = [phase.first for phase in self._phases]
        self._all = range(fragments)
        self._delay = delay

    def taken_after(self, step: int) -> tuple[int, ...]:
        """Return the fragments that are taken after a step, in order."""
        phase = self._phase(step)
        if step + 1 == phase.end:
            return tuple(self._all)
        number = phase.number(step)
        return tuple(p for p in self._all if self._offset(p, phase.every) == number)

    def applied_before(self, step: int) -> tuple[int, ...]:
        """Return the fragments whose merge is applied before a step, in the order of taking.

        In a run of T steps, those "before step T" are applied after the last one.
        """
        if step == 0:
            return ()
        phase = self._phase(step - 1)
        delayed = step - 1 - self._delay_in(phase)
        if phase.end is None or step < phase.end - 1:  # the end of a phase moves no merge
            return self.taken_after(delayed) if delayed >= phase.first else ()
        # No merge travels beyond its phase: those under way are applied before its last step.
        first = step - 1 if step == phase.end else max(phase.first, delayed)
        return tuple(p for taken in range(first, step) for p in self.taken_after(taken))

    def _delay_in(self, phase: _Phase) -> int:
        return min(self._delay, phase.every - 1)

    def _phase(self, step: int) -> _Phase:
        return self._phases[bisect_right(self._firsts, step) - 1]

    def _offset(self, fragment: int, every: int) -> int:
        """Return the number in the round of the step after which a fragment is taken."""
        return -(-(fragment + 1) * every // len(self._all))
