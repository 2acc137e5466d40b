"""Autotuning, `--sync auto`: which exchange a run uses, measured in its own first steps.

    a world of one rank     nothing is exchanged: allreduce
    measured before         what `exchange.toml` says, as long as the world is the same
    a short run             allreduce: it starts at once, and trials would take too long
    any other               trials in the first steps; where the run's length is unknown, after
                            `WARMUP` steps

Trials take turns, and no step is trained twice: a trial's steps are the training's.

    round 1    A A A A A A │ B B B B B B │ C …   a block each: `SKIPPED` steps, then `COUNTED`
    round 2    the `FINALISTS` fastest, in the opposite order, so that a drift counts on both sides

A step's time goes from its begin to the next one's. A block's time is the median over its counted
steps, which one evaluation or checkpoint in between hardly changes. The ranks then use the mean of
their times, so they choose alike. The first two steps of a block are skipped: the first binds the
model anew, and the second is the first to wait for what the new exchange sends. All candidates that
send float32 are equal up to the order of summation, so a run may change from one to another; a
lossy one is used only where the user asks for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from paceline.comm.communicator import broadcast_state, total
from paceline.config.world import SyncConfig
from paceline.errors import Message
from paceline.run.run import Run
from paceline.state.exchange_choice import CHOICE_NAME, Choice, read_choice, write_choice

SKIPPED, COUNTED, FINALISTS = 2, 4, 3
LEAST_NOISE, MOST_NOISE = 0.005, 0.03  # of a step's time
MIN_RUN_STEPS_PER_TRIAL_STEP = 10  # a shorter run uses allreduce, without trials
WARMUP = 100  # steps before the trials, where the run's length is unknown


@dataclass(frozen=True, kw_only=True)
class TrialSetting:
    """Setting of the trials: the run's folder, the remaining steps, and a callback for reports.

    Attributes:
        folder: the run's folder, in which rank 0 saves the choice; None: the choice is not saved.
        steps: number of remaining steps; None if unknown.
        report: called on rank 0 with a sentence for the user.
    """

    folder: Path | None = None
    steps: int | None = None
    report: Callable[[Message], None] = lambda note: None


class Autotuner:
    """Autotuner: selects the exchange of each step.

    Args:
        candidates: the exchanges to choose from; at least one.
        run: the run, whose ranks exchange.
        device: device of the communicator's tensors.
        setting: the run's folder, remaining steps and reports.
    """

    def __init__(
        self,
        candidates: Sequence[SyncConfig],
        run: Run,
        device: torch.device,
        setting: TrialSetting,
    ) -> None:
        self._candidates, self._setting = candidates, setting
        self._run, self._device = run, device
        self._trials: Trials | None = None
        self._before_trials = 0 if setting.steps is not None else WARMUP
        self._current: SyncConfig | None = None

    def begin_generation(self) -> SyncConfig:
        """Return the exchange with which the present generation begins; collective.

        In a later generation it is rank 0's choice. Where rank 0 has none yet, the trials begin
        again: ranks may have left the last generation in different ones.

        Raises:
            CommError: a peer was lost, or silent.
        """
        if self._current is None:
            self._current = self._begin()
        elif len(self._candidates) > 1:
            own = None if self._trials else _terms(self._current)
            what = "the broadcast of rank 0's exchange"
            chosen, self._before_trials = broadcast_state(
                self._run.context.communicator, [own, self._before_trials], self._device, what
            )
            if chosen is None:
                self._current = self._begin_trials()
            else:
                self._trials = None
                self._current = next(c for c in self._candidates if _terms(c) == chosen)
        return self._current

    def next(self) -> SyncConfig | None:
        """Return the exchange that continues from this step, if it is another; collective.

        Raises:
            CommError: a peer was lost, or silent.
            PacelineError: the choice can't be saved.
        """
        if self._trials is None:
            return None
        if self._before_trials:
            self._before_trials -= 1
            return None
        config = self._candidates[self._trials.begin()]
        if self._trials.outcome is not None:
            self._save(self._trials.outcome)
            self._trials = None
        before, self._current = self._current, config
        return None if config == before else config

    def _begin(self) -> SyncConfig:
        """Choose what needs no trials, or begin them; collective."""
        candidates, setting = self._candidates, self._setting
        if len(candidates) == 1:
            return candidates[0]
        if (known := self._known()) is not None:
            self._report(f"{_long(known)}, reused from this run's earlier trials ({CHOICE_NAME})")
            return known
        left, needed, plain = setting.steps, steps_of_trials(len(candidates)), self._plain
        if left is not None and left < MIN_RUN_STEPS_PER_TRIAL_STEP * needed:
            if left:
                steps = "1 step is" if left == 1 else f"{left} steps are"
                override = "set {--sync} and {--bucket_mb} to override"
                few = f"{_long(plain)}: {steps} too few for autotuning"
                self._report(Message(f"{{}}; {override}", few))
            return plain
        return self._begin_trials()

    def _begin_trials(self) -> SyncConfig:
        self._trials = Trials(len(self._candidates), time.perf_counter, self._mean)
        return self._plain if self._before_trials else self._candidates[0]

    @property
    def _plain(self) -> SyncConfig:
        """The exchange without trials."""
        return next((c for c in self._candidates if c.sync == "allreduce"), self._candidates[0])

    def _known(self) -> SyncConfig | None:
        """Return the choice that rank 0 has read, if it is still among the candidates."""
        known: list[object] | None = None
        if self._run.context.group.rank == 0 and self._setting.folder is not None:
            choice = read_choice(self._setting.folder)
            if choice is not None and choice.machines == self._machines:
                known = _terms(choice)
        what = "the broadcast of rank 0's exchange"
        known = broadcast_state(self._run.context.communicator, known, self._device, what)
        return next((c for c in self._candidates if _terms(c) == known), None)

    @property
    def _machines(self) -> tuple[int, ...]:
        return self._run.context.group.generation.workers_per_machine

    def _mean(self, values: Sequence[float]) -> Sequence[float]:
        own = torch.tensor(values, dtype=torch.float64, device=self._device)
        sums: Tensor = total(self._run.context.communicator, own, "the mean of measured steps")
        return [value / self._run.context.group.size for value in sums.tolist()]

    def _save(self, outcome: Outcome) -> None:
        if self._run.context.group.rank > 0:
            return
        chosen = self._candidates[outcome.chosen]
        figures = {_short(self._candidates[c]): 1000 * s for c, s in outcome.seconds.items()}
        if self._setting.folder is not None:
            choice = Choice(
                sync=chosen.sync,
                bucket_mb=chosen.bucket_mb,
                wire=chosen.wire,
                connections=chosen.connections,
                machines=self._machines,
                milliseconds={name: round(value, 3) for name, value in figures.items()},
            )
            write_choice(self._setting.folder, choice)
        own = figures.pop(_short(chosen))
        others = ", ".join(f"{name} {_number(value)}" for name, value in figures.items())
        noise = f"{100 * outcome.noise:.2g}%"
        fastest = own <= min(figures.values())
        equal = "" if fastest else f" (differences below {noise} are treated as noise)"
        flags = {"sync": chosen.sync, "bucket_mb": f"{chosen.bucket_mb:g}"}
        if chosen.connections > 1:
            flags["connections"] = str(chosen.connections)
        self._report(
            Message(
                "{} ms per step; {}{}. Pin this choice with "
                + " ".join(f"{{--{flag}}} {value}" for flag, value in flags.items()),
                f"{_long(chosen)}: {_number(own)}",
                others,
                equal,
            )
        )

    def _report(self, text: str | Message) -> None:
        if self._run.context.group.rank == 0:
            self._setting.report(Message("exchange: {}.", text))


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
        clock: returns seconds since an arbitrary origin.
        mean: returns given values averaged over the ranks; collective, with the same result on all
            ranks.

    Attributes:
        outcome: the outcome; None until the trials are finished.
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


def _terms(exchange: SyncConfig | Choice) -> list[object]:
    return [exchange.sync, exchange.bucket_mb, exchange.wire, exchange.connections]


def _long(config: SyncConfig) -> str:
    by = f", {config.connections} connections" if config.connections > 1 else ""
    return f"{config.sync}, {config.bucket_mb:g} MB buckets{by}"


def _short(config: SyncConfig) -> str:
    by = f" x {config.connections}" if config.connections > 1 else ""
    return f"{config.sync} {config.bucket_mb:g} MB{by}"


def _number(milliseconds: float) -> str:
    return f"{milliseconds:.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"
