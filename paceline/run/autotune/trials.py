"""Trials of exchanges in a run's own steps: which is the fastest.

Trials take turns, and no step is trained twice: a trial's steps are the training's.

    round 1    A A A A A A │ B B B B B B │ C …   a block each: `SKIPPED` steps, then `COUNTED`
    round 2    the `FINALISTS` fastest, in the opposite order, so that a drift counts on both sides

A step's time goes from its begin to the next one's. A block's time is the median over its counted
steps, which one evaluation or checkpoint in between hardly changes. The ranks then use the mean of
their times, so they choose alike. The first two steps of a block are skipped: the first binds the
model anew, and the second is the first to wait for what the new exchange sends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch

from paceline.comm.communicator import total
from paceline.generation.run import Run

SKIPPED = 2
COUNTED = 4
FINALISTS = 3
LEAST_NOISE = 0.005  # of a step's time
MOST_NOISE = 0.03


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of the trials: the chosen candidate and the measured times.

    Attributes:
        chosen: index of the chosen candidate.
        seconds: seconds per step, by candidate index.
        noise: the smallest significant difference between two candidates, as a fraction of a step's
            time.
    """

    chosen: int
    seconds: Mapping[int, float]
    noise: float


class Trials:
    """Schedule of the trials: the candidate that each step tries, and finally the chosen one.

    Args:
        count: the number of candidates, at least two; among equally fast ones, the first is chosen.
        run: the run, whose ranks decide together.

    Attributes:
        outcome: the outcome; None until the trials are finished.
    """

    def __init__(self, count: int, run: Run) -> None:
        self._run = run
        self._turns = list(range(count))
        self._rounds: list[dict[int, float]] = [{}]
        self._begun: list[float] = []  # when the steps of this block began
        self.outcome: Outcome | None = None

    def begin(self) -> int:
        """Return the candidate of the step that begins; collective where a round has ended."""
        if self.outcome is None:
            self._begun.append(self._run.timeline.now())
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

    def _mean(self, values: Sequence[float]) -> list[float]:
        """Return values averaged over the ranks, the same on all of them; collective."""
        own = torch.tensor(values, dtype=torch.float64)
        sums = total(self._run.context.group("all", "steps"), own, "the mean of measured steps")
        means: list[float] = (sums / self._run.context.world.size).tolist()
        return means


def steps_of_trials(count: int) -> int:
    """Return how many steps the trials of so many candidates take."""
    return (count + min(count, FINALISTS)) * (SKIPPED + COUNTED)


def finalists(seconds: Mapping[int, float]) -> list[int]:
    """Return the candidates of the second round, in its order."""
    return sorted(sorted(seconds, key=lambda c: seconds[c])[:FINALISTS], reverse=True)


def decide(first: Mapping[int, float], second: Mapping[int, float]) -> Outcome:
    """Choose the first candidate that none other beats by more than the noise.

    Each candidate of both rounds has a ratio, time in round 2 / time in round 1. The noise is half
    of the largest relative deviation of a ratio from the median ratio, between `LEAST_NOISE` and
    `MOST_NOISE`: below the lower limit a difference doesn't matter, and above the upper limit the
    smallest time is the best guess.

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
