"""Which of several ways to exchange is the fastest: tried in turns, in a run's own first steps.

    round 1    A A A A A A │ B B B B B B │ C …   a block each: `SKIPPED` steps, then `COUNTED`
    round 2    the `FINALISTS` fastest, in the opposite order, so that a drift counts on both sides

Nothing is trained twice: a trial's steps are the training's. A step's time goes from its begin to
the next one's; a block's figure is the median, in which one evaluation or checkpoint in between
doesn't count, and the mean over the ranks, which decide alike. A first step isn't counted, because
it binds, nor the second, which is the first to wait for what the new exchange sends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

SKIPPED, COUNTED, FINALISTS = 2, 4, 3
LEAST_NOISE, MOST_NOISE = 0.005, 0.03  # of a step's time


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What trials have shown.

    Attributes:
        chosen: the candidate's place in the list.
        seconds: a step's, of each candidate.
        noise: the share of a step's time by which two have to differ.
    """

    chosen: int
    seconds: Mapping[int, float]
    noise: float


class Trials:
    """Tells which candidate each step tries, and at last which is chosen.

    Args:
        count: the number of candidates, two or more; of those that are equally fast the first is
            chosen.
        clock: seconds since any moment.
        mean: of the ranks' values, the same on all of them; collective.

    Attributes:
        outcome: None until all is tried.
    """

    def __init__(
        self,
        count: int,
        clock: Callable[[], float],
        mean: Callable[[Sequence[float]], Sequence[float]],
    ) -> None:
        self._clock, self._mean = clock, mean
        self._turns = list(range(count))
        self._rounds: list[dict[int, float]] = [{}]
        self._begun: list[float] = []  # when the steps of this block began
        self.outcome: Outcome | None = None

    def begin(self) -> int:
        """Return the candidate of the step that begins; collective where a round has ended.

        Raises:
            CommError: a peer was lost, or silent.
        """
        if self.outcome is None:
            self._begun.append(self._clock())
            if len(self._begun) > SKIPPED + COUNTED:
                self._end_block()
        return self._turns[0] if self.outcome is None else self.outcome.chosen

    def _end_block(self) -> None:
        times = [end - begin for begin, end in pairwise(self._begun)]
        self._rounds[-1][self._turns.pop(0)] = median(times[SKIPPED:])
        del self._begun[:-1]
        if not self._turns:
            self._end_round()

    def _end_round(self) -> None:
        candidates, times = zip(*self._rounds[-1].items(), strict=True)
        self._rounds[-1] = dict(zip(candidates, self._mean(times), strict=True))
        if len(self._rounds) == 1:
            self._turns = finalists(self._rounds[0])
            self._rounds.append({})
        else:
            self.outcome = decide(*self._rounds)


def steps_of_trials(count: int) -> int:
    """Return how many steps the trials of so many candidates take."""
    return (count + min(count, FINALISTS)) * (SKIPPED + COUNTED)


def finalists(seconds: Mapping[int, float]) -> list[int]:
    """Return the candidates of the second round, in its order."""
    return sorted(sorted(seconds, key=lambda c: seconds[c])[:FINALISTS], reverse=True)


def decide(first: Mapping[int, float], second: Mapping[int, float]) -> Outcome:
    """Choose the first candidate of those that nobody beats by more than the noise.

    The noise is by how much one and the same candidate differs between the rounds, beyond what all
    differ, within limits: below the lower one nobody would notice, and above the upper one the
    smallest time is the best guess there is.

    Args:
        first: seconds a step of all candidates.
        second: those of the finalists.
    """
    ratios = [second[c] / first[c] for c in second]
    noise = max(abs(ratio / median(ratios) - 1) for ratio in ratios) / 2
    noise = min(max(noise, LEAST_NOISE), MOST_NOISE)
    both = {c: (first[c] + second[c]) / 2 for c in second}
    limit = min(both.values()) * (1 + noise)
    chosen = min(c for c in both if both[c] <= limit)
    return Outcome(chosen=chosen, seconds={**first, **both}, noise=noise)
