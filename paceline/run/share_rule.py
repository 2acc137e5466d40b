"""The rule of `--shares measured`: new shares of the global batch, from the ranks' measured times.

    n_r  samples of rank r     t_r  its own milliseconds a sample, the median of some steps
    n'_r its new samples, in proportion to 1 / t_r

All ranks are equally fast at the fixed point, also where a step has costs that don't grow with its
samples: each change leaves only the part of the difference that these costs cause.

Few steps show a large difference, many steps a small one. So medians of several lengths are
compared, each with a threshold for the step time that new shares would save:

    threshold(k steps) = LEAST_GAIN + factor(k) * noise

where the noise is the typical difference between two successive steps. A pure state machine: no
clock, and the same on all ranks, which pass it the same numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from paceline.data.shares import balanced

LEAST_GAIN = 0.03  # of the slowest rank's time; a smaller one isn't worth a change
WINDOWS = ((3, 2.4), (11, 0.8), (31, 0.3))  # steps of a median, and its factor
_STEPS = WINDOWS[-1][0]
_FIRST_NOISE = 0.05  # assumed until `_FIRST_STEPS` steps have been seen
_FIRST_STEPS = 10
LEAST = 2  # samples a rank, where the batch has as many: BatchNorm needs more than one value


def shares_for(count: int, milliseconds: Sequence[float]) -> tuple[int, ...]:
    """Return the shares that give all ranks equal computation times, at least `LEAST` if possible.

    Args:
        count: number of samples of a full batch.
        milliseconds: (ranks,) time a sample, above 0.

    Returns:
        (ranks,) numbers of samples, which sum to `count`.
    """
    return balanced(count, milliseconds, least=min(LEAST, count // len(milliseconds)))


class ShareRule:
    """Share rule: decides when the ranks' shares change, and to what.

    Args:
        shares: (ranks,) samples of a full batch, with which the measurement begins.

    Attributes:
        shares: the present ones.
    """

    def __init__(self, shares: Sequence[int]) -> None:
        self.shares = tuple(shares)
        self._rows: deque[tuple[float, ...]] = deque(maxlen=_STEPS)  # (ranks,) a sample
        first = (_FIRST_NOISE,) * len(self.shares)
        self._noise = deque([first] * _FIRST_STEPS, maxlen=_STEPS)

    def measure(self, times: Sequence[float]) -> tuple[int, ...] | None:
        """Take a step's times; return new shares where they are due, which are then the present.

        Args:
            times: (ranks,) the ranks' own milliseconds of a full batch with the present shares;
                above 0.

        Returns:
            (ranks,) samples of a full batch; None: the shares stay.
        """
        counted = zip(times, self.shares, strict=True)
        row = tuple(time / max(1, share) for time, share in counted)  # a placeholder for 0
        if self._rows:
            pairs = zip(row, self._rows[-1], strict=True)
            self._noise.append(tuple(abs(new / old - 1) for new, old in pairs))
        self._rows.append(row)
        noise = max(median(column) for column in zip(*self._noise, strict=True))
        for steps, factor in WINDOWS:
            if len(self._rows) < steps:
                break
            newest = list(self._rows)[-steps:]
            each = [median(column) for column in zip(*newest, strict=True)]
            wanted = shares_for(sum(self.shares), each)
            if self._gain(wanted, each) > LEAST_GAIN + factor * noise:
                self.shares = wanted
                self._rows.clear()
                return wanted
        return None

    def _gain(self, shares: Sequence[int], each: Sequence[float]) -> float:
        """Return the part of the slowest rank's time that other shares would save."""
        before, after = (
            max(time * max(1, n) for time, n in zip(each, one, strict=True))
            for one in (self.shares, shares)
        )
        return 1 - after / before
