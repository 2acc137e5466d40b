"""Configuration of weight averaging (`--sync average`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Literal, TypeAlias, get_args

from paceline.config.rules import positive, whole, within
from paceline.config.world import ServerPlace
from paceline.errors import ConfigError, Message, many

Every: TypeAlias = int | str | Sequence[tuple[int, int]]
"""Steps of a round: H; or phases, ((first step, H), …); or the text of either, "1@0,50@1000"."""

OUTER_RULES: Mapping[str, tuple[str, ...]] = {
    "mean": (),
    "easgd": ("lr",),
    "bmuf": ("lr", "momentum"),
    "diloco": ("lr", "momentum"),
    "sparseloco": ("lr",),
}
"""Outer rules, with the flags that each has, without "outer_"; `update.outer.average` maps them to
classes."""

WITHOUT_DELAY = ("easgd",)
"""Outer rules whose merges can't be applied later."""

ARGUMENTS: Mapping[str, str] = {
    "average_every": "every",
    "average_delay": "delay",
    "average_mix": "mix",
    "average_momenta": "momenta",
    "average_through": "through",
    "outer_lr": "lr",
    "outer_momentum": "momentum",
    "outer": "outer",
    "fragments": "fragments",
}
"""Names of the flags in a script: fields of `Average` and of its rule."""

OuterName = Literal["mean", "easgd", "bmuf", "diloco", "sparseloco"]
Momenta = Literal["keep", "reset", "average"]
Through = Literal["workers", "server"]

UNSET = -1.0
"""A number that isn't given; a run's configuration file can't hold None."""


@dataclass(frozen=True, kw_only=True)
class AverageConfig:
    """Weight averaging, with --sync average."""

    average_every: str = "50"
    """Number of steps between merges of the workers' weights; or a schedule, H@STEP,H@STEP,…:
    1@0,50@1000 merges after each of the first 1,000 steps, and every 50 steps from then on."""

    outer: OuterName = "mean"
    """Outer rule, which makes new weights of the workers' mean. mean: the mean itself. easgd:
    elastic averaging. bmuf: Caffe2's blockwise model-update filtering. diloco: SGD with Nesterov
    momentum. sparseloco: SGD for --wire topk and int4, whose error feedback decays."""

    outer_lr: float = UNSET
    """Learning rate of the outer rule; for easgd, the moving rate of the center. -1: the rule's
    default (easgd 0.9, bmuf 1, diloco 0.7, sparseloco 1)."""

    outer_momentum: float = UNSET
    """Momentum of the outer rule. -1: the rule's default (diloco 0.9; bmuf 1 - 1/N for N
    workers)."""

    fragments: int = 1
    """Number of fragments of the model. Each is merged once in a round, one after another, so that
    the network carries an even stream."""

    average_delay: int = -1
    """Number of steps that run while a merge travels, before it is applied. A longer
    delay hides a slower transfer, but costs accuracy. -1: H / fragments / 4, rounded down; 0 with
    easgd."""

    average_mix: float = UNSET
    """With a delay, the fraction of its own weights that a worker retains when a merge is applied,
    as in Streaming DiLoCo. -1: what its newer steps changed is added to the merged weights."""

    average_momenta: Momenta = "keep"
    """What becomes of each worker's optimizer state at a merge. keep: it stays as it is. reset: it
    is cleared. average: momenta are averaged, as the weights are; they travel unencoded."""

    average_through: Through = "workers"
    """What merges. workers: each worker merges its shard of the model. server: a process that
    trains nothing; all workers send it their changes, and it returns the sums. The result is the
    same. A resumed run may change between the two."""

    average_server: ServerPlace = "run"
    """With --average_through server, what starts the server. run: `paceline train`, on machine 0.
    apart: a user, with `paceline serve`, on any machine. Under another launcher it is always
    apart."""

    def __post_init__(self) -> None:
        delay = None if self.average_delay == -1 else self.average_delay
        check_rounds(self.average_every, self.fragments, delay)
        check_choice("outer", self.outer, tuple(OUTER_RULES))
        check_choice("average_momenta", self.average_momenta, get_args(Momenta))
        check_choice("average_through", self.average_through, get_args(Through))
        check_choice("average_server", self.average_server, get_args(ServerPlace))
        if self.average_server != "run" and self.average_through != "server":
            raise ConfigError(
                flag="average_server",
                value=self.average_server,
                rule="there is no server without a merge through one",
                remedy=Message("leave it out, or give {--average_through} server"),
            )
        self._check_numbers()
        for option in ("lr", "momentum"):
            flag = f"outer_{option}"
            if getattr(self, flag) != UNSET and option not in OUTER_RULES[self.outer]:
                others = [name for name, options in OUTER_RULES.items() if option in options]
                raise ConfigError(
                    flag=flag,
                    value=getattr(self, flag),
                    rule=Message(f"{{--outer}} {self.outer} has no {_WORDS[option]}"),
                    remedy=Message(f"leave it out, or use {{--outer}} {' or '.join(others)}"),
                )
        if delay and self.outer in WITHOUT_DELAY:
            raise no_delay(delay, self.outer)
        if delay is None:
            delay = 0
            if self.outer not in WITHOUT_DELAY:
                delay = default_delay(phases_of(self.average_every), self.fragments)
        check_mix(None if self.average_mix == UNSET else self.average_mix, delay)

    def _check_numbers(self) -> None:
        if self.outer_lr != UNSET:
            positive("outer_lr", self.outer_lr)
            if self.outer == "easgd" and self.outer_lr > 1:
                rule = Message("must be at most 1 with {--outer} easgd")
                remedy = Message("use 0.9, the paper's, or another {--outer}")
                raise ConfigError(flag="outer_lr", value=self.outer_lr, rule=rule, remedy=remedy)
        if self.outer_momentum != UNSET:
            within("outer_momentum", self.outer_momentum, 0, 1)

    @property
    def given(self) -> tuple[str, ...]:
        """The flags whose value isn't the default."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) != f.default)


_WORDS = {"lr": "learning rate", "momentum": "momentum"}


def phases_of(every: Every) -> tuple[tuple[int, int], ...]:
    """Return the phases of a schedule, ((first step, H), …), from step 0 on.

    Raises:
        ConfigError: it isn't a number, or a list of phases in order, the first from step 0; or an H
            is 0.
    """
    phases = _read_phases(every)
    if phases is None:
        raise _no_schedule(every, "must be a number of steps, or phases such as 1@0,50@1000")
    if any(h < 1 for _, h in phases):
        raise _no_schedule(every, "must be at least 1 step", "1 merges after each step")
    starts = [first for first, _ in phases]
    if starts[:1] != [0] or any(a >= b for a, b in pairwise(starts)):
        raise _no_schedule(every, "phases must begin at step 0 and be in ascending order of steps")
    return phases


def _read_phases(every: Every) -> tuple[tuple[int, int], ...] | None:
    if isinstance(every, bool):
        return None
    if isinstance(every, int):
        return ((0, every),)
    if isinstance(every, str):
        return _parse(every)
    if not isinstance(every, list | tuple) or not every:
        return None
    pairs = [pair for pair in every if isinstance(pair, list | tuple) and len(pair) == 2]
    if len(pairs) < len(every) or any(type(number) is not int for pair in pairs for number in pair):
        return None
    return tuple((first, h) for first, h in pairs)


def _parse(text: str) -> tuple[tuple[int, int], ...] | None:
    """Read "50" or "1@0,50@1000"; None: it is neither."""
    phases = []
    for word in text.split(","):
        h, at, first = (part.strip() for part in word.partition("@"))
        if (
            not h.isdecimal()
            or len(h + first) > 30
            or (at and not first.isdecimal())
            or (not at and "," in text)
        ):
            return None
        phases.append((int(first or 0), int(h)))
    return tuple(phases)


def _no_schedule(every: Every, rule: str, remedy: str = "") -> ConfigError:
    return ConfigError(flag="average_every", value=every, rule=rule, remedy=remedy)


def check_rounds(every: Every, fragments: int, delay: int | None) -> None:
    """Require a schedule, a number of fragments and a delay that fits into a round.

    Raises:
        ConfigError: one breaks its rule.
    """
    longest = max(h for _, h in phases_of(every))
    whole("fragments", fragments, 1)
    if delay is None:
        return
    whole("average_delay", delay, 0)
    if delay >= longest:
        raise ConfigError(
            flag="average_delay",
            value=delay,
            rule=Message(
                "must be less than the longest round of {--average_every}, {} steps: a merge is "
                "applied before the next one is taken",
                longest,
            ),
            remedy=f"use at most {longest - 1}, or longer rounds",
        )


def require_merge(every: Every, steps: int) -> None:
    """Require that workers merge before a run's last step.

    Args:
        every: the schedule.
        steps: number of steps of the run.

    Raises:
        ConfigError: all of its rounds are longer than the run's steps for them.
    """
    phases = [phase for phase in phases_of(every) if phase[0] < max(1, steps)]
    ends = [*(first for first, _ in phases[1:]), steps]
    if all(h > end - first for (first, h), end in zip(phases, ends, strict=True)):
        raise ConfigError(
            flag="average_every",
            value=every,
            rule=f"must be at most the run's {many(steps, 'step')}, or its workers would merge "
            "only after the last one",
            remedy="give at most the number of steps of an epoch, or train for more epochs",
        )


def default_delay(phases: Sequence[tuple[int, int]], fragments: int) -> int:
    """Return the default delay: a quarter of the steps between the merges of two fragments."""
    return max(h for _, h in phases) // fragments // 4


def check_mix(mix: float | None, delay: int) -> None:
    """Require a fraction, and a delay if it is given.

    Raises:
        ConfigError: it isn't a fraction, or there is no delay.
    """
    if mix is None:
        return
    if isinstance(mix, bool) or not isinstance(mix, int | float):
        raise ConfigError(flag="average_mix", value=repr(mix), rule="must be a number")
    within("average_mix", mix, 0, 1)
    if delay == 0:
        raise ConfigError(
            flag="average_mix",
            value=mix,
            rule="needs a delay: without one a worker has no newer weights to mix in",
            remedy=Message(
                "leave it out, or set {--average_delay} to 1 or more, with an {--outer} that "
                "allows it"
            ),
        )


def check_choice(flag: str, value: object, values: tuple[str, ...]) -> None:
    """Require one of some values.

    Raises:
        ConfigError: it isn't.
    """
    if value not in values:
        raise ConfigError(flag=flag, value=value, rule=f"must be one of {', '.join(values)}")


def no_delay(delay: int, rule: str) -> ConfigError:
    """Return the error of a delay with a rule that has none."""
    return ConfigError(
        flag="average_delay",
        value=delay,
        rule=Message(f"{{--outer}} {rule} changes the weights that it was computed from"),
        remedy=Message("use {--average_delay} 0, or another {--outer}"),
    )
