"""Autotuning, `--sync auto`: which exchange a run uses, predicted and then measured in its steps.

    a world of one rank     nothing is exchanged: allreduce
    chosen before           the choice in `exchange.toml`, as long as the world is the same
    a very short run        allreduce: it starts at once
    a short run             allreduce for some steps, which are timed; then what is predicted to
                            save `LEAST_GAIN` of a step, without trials
    any other               allreduce for some steps, which are timed; then what is predicted to be
                            the fastest; trials of the `SHORTLIST` best predictions, at once, or
                            where the run's length is unknown, after `WARMUP` steps

Where nothing can be predicted (on GPUs, say), all candidates are tried. All that send float32 are
equal up to the order of summation, so a run may change from one to another; a lossy one is used
only where the user asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.comm.communicator import broadcast_state
from paceline.config.world import SyncConfig
from paceline.errors import Message
from paceline.generation.run import Run
from paceline.run.autotune.prediction import StepPredictor
from paceline.run.autotune.shortlist import SHORTLIST, shortlist, unpredicted
from paceline.run.autotune.trials import Outcome, Trials, steps_of_trials
from paceline.state.exchange_choice import CHOICE_NAME, Choice, read_choice, write_choice

UNTIMED = 3  # steps: the first are slower than others, or traced
TIMED = 5  # steps
MIN_RUN_STEPS_PER_TRIAL_STEP = 10  # a shorter run has no trials
MIN_RUN_STEPS_PER_TIMED_STEP = 20  # a shorter run has no prediction
LEAST_GAIN = 0.05  # of a step's time; without trials a smaller one isn't used
WARMUP = 100  # steps before the trials, where the run's length is unknown
_UNPREDICTABLE = (
    "a part is compiled, a forward follows the backward of each step, or other parameters are "
    "trained than before"
)


@dataclass(frozen=True, kw_only=True)
class TrialSetting:
    """Setting of the trials: the run's folder, and the remaining steps.

    Attributes:
        folder: the run's folder, in which rank 0 saves the choice; None: the choice is not saved.
        steps: number of remaining steps; None if unknown.
    """

    folder: Path | None = None
    steps: int | None = None


class Autotuner:
    """Autotuner: selects the exchange of each step.

    Args:
        candidates: the exchanges to choose from; at least one.
        run: the run, whose ranks exchange.
        setting: the run's folder, and remaining steps.
        predictor: predicts the candidates' times; None: nothing is predicted.
    """

    def __init__(
        self,
        candidates: Sequence[SyncConfig],
        run: Run,
        setting: TrialSetting,
        predictor: StepPredictor | None = None,
    ) -> None:
        self._candidates = candidates
        self._setting = setting
        self._run = run
        self._predictor = predictor
        self._timed = UNTIMED + TIMED if predictor is not None else 0
        self._trials_from = self._timed + (WARMUP if setting.steps is None else 0)
        self._steps: int | None = None  # since tuning began; None: it isn't active
        self._runs_trials = True  # False: uses the prediction as it is
        self._shortlist: list[int] = []  # candidates of the trials
        self._trials: Trials | None = None
        self._current: SyncConfig | None = None

    def begin_generation(self) -> SyncConfig:
        """Return the exchange with which the present generation begins; collective.

        In a later generation it is rank 0's choice. Where rank 0 has none yet, tuning begins again:
        ranks may have left the last generation in different exchanges.
        """
        if self._current is None:
            self._current = self._begin()
        elif len(self._candidates) > 1:
            own: list[object] | None = _key(self._current)
            left = 0
            if self._steps is not None:
                own = None
                left = max(self._timed, self._trials_from - self._steps)
            what = "the broadcast of rank 0's exchange"
            communicator = self._run.context.group("all", "steps")
            chosen, left = broadcast_state(communicator, [own, left], what)
            if chosen is None:
                self._trials_from = left
                self._current = self._begin_tuning()
            else:
                self._steps = self._trials = None
                self._current = next(c for c in self._candidates if _key(c) == chosen)
        return self._current

    def next(self) -> SyncConfig | None:
        """Return the exchange that continues from this step, if it is another; collective.

        Raises:
            PacelineError: the choice can't be saved.
        """
        if self._steps is None:
            return None
        step = self._steps
        before = self._current
        self._steps += 1
        if self._predictor is not None and UNTIMED <= step <= self._timed:
            self._predictor.begin_step()
            if step == self._timed:
                self._predict()
        if self._runs_trials and step >= self._trials_from:
            self._try()
        return None if self._current == before else self._current

    def _predict(self) -> None:
        """Use what is predicted to be the fastest, and shorten the list for the trials."""
        assert self._predictor is not None
        seconds = self._predictor.predict()
        if seconds is None and self._is_short(len(self._shortlist)):
            self._runs_trials = False
            self._report_untried(self._default, f"no step times predicted ({_UNPREDICTABLE})")
        if not self._runs_trials:
            self._steps = None
        if seconds is None:
            return
        self._shortlist = shortlist(self._candidates, seconds)
        fastest = self._shortlist[0]
        default = self._candidates.index(self._default)
        if not self._runs_trials and seconds[fastest] > (1 - LEAST_GAIN) * seconds[default]:
            fastest = default
        self._current = self._candidates[fastest]
        milliseconds = {_short(c): 1000 * s for c, s in zip(self._candidates, seconds, strict=True)}
        self._run.recorder.event(
            "predicted",
            exchange=_short(self._current),
            milliseconds={name: round(value, 3) for name, value in milliseconds.items()},
        )
        if self._predictor.note is not None and self._run.leads:
            self._run.note(self._predictor.note)
        if not self._runs_trials:
            self._write(self._current, {})
            self._report_prediction(self._current, milliseconds)

    def _try(self) -> None:
        """Continue with the candidate of the present trial; after the trials, with the chosen."""
        if self._trials is None:
            self._trials = Trials(len(self._shortlist), self._run)
        self._current = self._candidates[self._shortlist[self._trials.begin()]]
        if self._trials.outcome is not None:
            self._save(self._trials.outcome)
            self._steps = self._trials = None

    def _begin(self) -> SyncConfig:
        """Choose what needs no trials, or begin them; collective."""
        candidates = self._candidates
        setting = self._setting
        if len(candidates) == 1:
            return candidates[0]
        count = len(unpredicted(candidates))
        if self._predictor is not None:
            count = min(count, SHORTLIST)
        short = self._is_short(count)
        if (known := self._known(predicted=short)) is not None:
            self._report(f"{_long(known)}, reused from this run's earlier start ({CHOICE_NAME})")
            return known
        if not short:
            return self._begin_tuning()
        assert setting.steps is not None
        if self._timed and setting.steps >= MIN_RUN_STEPS_PER_TIMED_STEP * self._timed:
            self._runs_trials = False
            return self._begin_tuning()
        if setting.steps:
            steps = "1 step is" if setting.steps == 1 else f"{setting.steps} steps are"
            self._report_untried(self._default, f"{steps} too few for autotuning")
        return self._default

    def _is_short(self, count: int) -> bool:
        """Return whether trials of so many candidates would take too many of the run's steps."""
        steps = self._setting.steps
        needed = steps_of_trials(count)
        return steps is not None and steps < MIN_RUN_STEPS_PER_TRIAL_STEP * needed

    def _begin_tuning(self) -> SyncConfig:
        if self._predictor is not None:
            self._predictor.restart()
        self._steps = 0
        self._trials = None
        self._shortlist = unpredicted(self._candidates)
        return self._default

    @property
    def _default(self) -> SyncConfig:
        """The exchange without trials."""
        return next((c for c in self._candidates if c.sync == "allreduce"), self._candidates[0])

    def _known(self, *, predicted: bool) -> SyncConfig | None:
        """Return the choice that rank 0 has read, if it is still among the candidates; collective.

        Args:
            predicted: whether it may be one that was predicted only.
        """
        known: list[object] | None = None
        if self._run.leads and self._setting.folder is not None:
            choice = read_choice(self._setting.folder)
            if choice is not None and choice.machines == self._machines:
                known = _key(choice) if choice.milliseconds or predicted else None
        what = "the broadcast of rank 0's exchange"
        known = broadcast_state(self._run.context.group("all", "steps"), known, what)
        return next((c for c in self._candidates if _key(c) == known), None)

    @property
    def _machines(self) -> tuple[int, ...]:
        return self._run.context.world.generation.workers_per_machine

    def _save(self, outcome: Outcome) -> None:
        if not self._run.leads:
            return
        tried = [self._candidates[c] for c in self._shortlist]
        chosen = tried[outcome.chosen]
        figures = {_short(tried[c]): 1000 * s for c, s in outcome.seconds.items()}
        self._write(chosen, figures)
        own = figures.pop(_short(chosen))
        others = ", ".join(f"{name} {_format_ms(value)}" for name, value in figures.items())
        noise = f"{100 * outcome.noise:.2g}%"
        fastest = own <= min(figures.values())
        equal = "" if fastest else f" (differences below {noise} are treated as noise)"
        measured = f"{_long(chosen)}: {_format_ms(own)} ms per step; {others}{equal}"
        self._report(_pinned(measured, chosen))

    def _write(self, chosen: SyncConfig, milliseconds: Mapping[str, float]) -> None:
        """Write the choice for the run's next start, on rank 0."""
        if self._setting.folder is None or not self._run.leads:
            return
        choice = Choice(
            sync=chosen.sync,
            bucket_mb=chosen.bucket_mb,
            wire=chosen.wire,
            connections=chosen.connections,
            machines=self._machines,
            milliseconds={name: round(value, 3) for name, value in milliseconds.items()},
        )
        write_choice(self._setting.folder, choice)

    def _report_prediction(self, chosen: SyncConfig, milliseconds: Mapping[str, float]) -> None:
        compared = (*(self._candidates[c] for c in self._shortlist), self._default)
        listed = list(dict.fromkeys(map(_short, compared)))
        own = _short(chosen)
        others = ", ".join(
            f"{name} {_format_ms(milliseconds[name])}" for name in listed if name != own
        )
        unused = "" if own == listed[0] else f" (a gain below {LEAST_GAIN:.0%} is not used)"
        predicted = f"predicted {_format_ms(milliseconds[own])} ms per step; {others}{unused}"
        self._report(_pinned(f"{_long(chosen)}: {predicted}", chosen))

    def _report_untried(self, chosen: SyncConfig, why: str) -> None:
        override = "set {--sync} and {--bucket_mb} to override"
        self._report(Message(f"{{}}; {override}", f"{_long(chosen)}: {why}"))

    def _report(self, text: str | Message) -> None:
        if self._run.leads:
            self._run.note(Message("exchange: {}.", text))


def _pinned(text: str, chosen: SyncConfig) -> Message:
    """Add to a text how to choose the same exchange again."""
    flags = {"sync": chosen.sync, "bucket_mb": f"{chosen.bucket_mb:g}"}
    if chosen.connections > 1:
        flags["connections"] = str(chosen.connections)
    pin = " ".join(f"{{--{flag}}} {value}" for flag, value in flags.items())
    return Message(f"{{}}. Pin this choice with {pin}", text)


def _key(exchange: SyncConfig | Choice) -> list[object]:
    return [exchange.sync, exchange.bucket_mb, exchange.wire, exchange.connections]


def _long(config: SyncConfig) -> str:
    by = f", {config.connections} connections" if config.connections > 1 else ""
    return f"{config.sync}, {config.bucket_mb:g} MB buckets{by}"


def _short(config: SyncConfig) -> str:
    by = f" x {config.connections}" if config.connections > 1 else ""
    return f"{config.sync} {config.bucket_mb:g} MB{by}"


def _format_ms(milliseconds: float) -> str:
    return f"{milliseconds:.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"
