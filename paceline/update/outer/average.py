"""`Average`: what `sync=` takes for rare exchange, and how it is made of flags and of text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any, get_args

from paceline.config.average import (
    ARGUMENTS,
    UNSET,
    AverageConfig,
    Every,
    Momenta,
    OuterName,
    Through,
    check_choice,
    check_mix,
    check_rounds,
    default_delay,
    no_delay,
    phases_of,
)
from paceline.errors import ConfigError, Message, options_named
from paceline.update.outer.bmuf import BMUF
from paceline.update.outer.diloco import DiLoCo
from paceline.update.outer.easgd import EASGD
from paceline.update.outer.mean import Mean
from paceline.update.outer.outer_rule import OuterRule
from paceline.update.outer.round_schedule import RoundSchedule
from paceline.update.outer.sparseloco import SparseLoCo

RULES: Mapping[str, type[OuterRule]] = {
    "mean": Mean,
    "easgd": EASGD,
    "bmuf": BMUF,
    "diloco": DiLoCo,
    "sparseloco": SparseLoCo,
}
"""Classes of the outer rules by their names in flags."""

_FIELDS = {"easgd": {"lr": "beta"}}
"""Names of a rule's numbers where they aren't the flags', without "outer_"."""


@dataclass(frozen=True, kw_only=True)
class Average:
    """Local SGD: workers train apart and merge their weights every H steps.

    Args:
        every: H, the number of steps between merges; or phases, ((first step, H), …) or
            "1@0,50@1000".
        outer: the outer rule, which makes new weights of the workers' mean; or its name: "mean",
            "easgd", "bmuf", "diloco" or "sparseloco".
        fragments: the number of fragments of the model, merged one after another in each round.
        delay: the number of steps that run while a merge travels, less than H; None:
            H / fragments / 4, rounded down, of the longest H; 0 if the rule allows no delay.
        mix: with a delay, the fraction of its own weights that a worker retains when a merge is
            applied, as in Streaming DiLoCo; None: what its newer steps changed is added to the
            merged weights.
        momenta: what becomes of the optimizers' state at a merge: "keep", "reset" or "average".
        through: what merges: the "workers" themselves, or a "server" that `paceline serve` starts.

    Raises:
        ConfigError: a value breaks its rule.
    """

    every: Every = 50
    outer: OuterRule | OuterName = field(default_factory=Mean)
    fragments: int = 1
    delay: int | None = None
    mix: float | None = None
    momenta: Momenta = "keep"
    through: Through = "workers"

    def __post_init__(self) -> None:
        with options_named(_argument):
            check_rounds(self.every, self.fragments, self.delay)
            if isinstance(self.outer, str):
                check_choice("outer", self.outer, tuple(RULES))
                object.__setattr__(self, "outer", RULES[self.outer]())
            elif OuterRule not in type(self.outer).__mro__:
                raise ConfigError(
                    flag="outer",
                    value=repr(self.outer),
                    rule=f"must be {', '.join(RULES)}, or an instance of a class of outer rules",
                    remedy="create one, as in DiLoCo(lr=0.7), or derive your class from OuterRule",
                )
            if self.delay and not self.rule.allows_delay:
                raise no_delay(self.delay, type(self.rule).__name__)
            check_choice("average_momenta", self.momenta, get_args(Momenta))
            check_choice("average_through", self.through, get_args(Through))
            phases = phases_of(self.every)
            object.__setattr__(self, "every", phases if len(phases) > 1 else phases[0][1])
            check_mix(self.mix, self.steps_of_delay)

    @property
    def rule(self) -> OuterRule:
        """The outer rule."""
        assert not isinstance(self.outer, str)  # __post_init__ has replaced the name
        return self.outer

    @property
    def phases(self) -> tuple[tuple[int, int], ...]:
        """The schedule: ((first step, H), …)."""
        return phases_of(self.every)

    @property
    def steps_of_delay(self) -> int:
        """The number of steps that run while a merge travels, where rounds are longest."""
        if self.delay is not None:
            return self.delay
        if not self.rule.allows_delay:
            return 0
        return default_delay(self.phases, self.fragments)

    def schedule(self, steps: int | None = None) -> RoundSchedule:
        """Return the round schedule of a run of `steps` steps; None: their number isn't known."""
        return RoundSchedule(self.phases, self.fragments, self.steps_of_delay, steps)

    def facts(self) -> dict[str, str]:
        """Return the options by name as text, which must be equal on all ranks and at a resume."""
        rule = self.rule if is_dataclass(self.rule) else type(self.rule).__name__  # no address
        options = {
            **vars(self),
            "outer": rule,
            "delay": self.steps_of_delay,
            "mix": self.mix,
        }
        return {name: str(value) for name, value in options.items()}


def average_from_flags(sync: str, config: AverageConfig) -> Average | None:
    """Return the `Average` that flags describe; None with another exchange than `average`.

    Args:
        sync: the value of --sync.
        config: the values of the flags of averaging.

    Raises:
        ConfigError: flags of averaging are given without --sync average.
    """
    if sync != "average":
        if config.given:
            flag = config.given[0]
            value = getattr(config, flag)
            raise ConfigError(
                Message(
                    f"{{--{flag}}} {{}} needs {{--sync}} average: with {{--sync}} {sync} workers "
                    "exchange gradients in each step.",
                    value,
                )
            )
        return None
    return Average(
        every=config.average_every,
        outer=_make_rule(config),
        fragments=config.fragments,
        delay=None if config.average_delay == UNSET else config.average_delay,
        mix=None if config.average_mix == UNSET else config.average_mix,
        momenta=config.average_momenta,
        through=config.average_through,
    )


def parse_average(sync: str) -> Average | None:
    """Return the `Average` of a short form, such as "average:every=50,outer=diloco,lr=0.7".

    The options are those of `Average`, and "lr" and "momentum" of the outer rule. None: `sync` is
    the name of another exchange.

    Raises:
        ConfigError: there is no such option, or a value breaks its rule.
    """
    name, colon, text = sync.partition(":")
    if name != "average":
        return None
    flags = {argument: flag for flag, argument in ARGUMENTS.items()}
    values: dict[str, Any] = {}
    with options_named(_argument):
        for item in re.split(r",(?=[^,=]*=)", text) if colon else ():  # phases have commas, too
            option, equals, word = (part.strip() for part in item.partition("="))
            if not equals or option not in flags or flags[option] in values:
                known = ", ".join(sorted(flags))
                raise ConfigError(
                    f"sync={sync!r}: {item!r} must be an option with its value, such as every=50, "
                    f"given once; the options are {known}."
                )
            values[flags[option]] = _read(flags[option], word)
        return average_from_flags(name, AverageConfig(**values))


def _make_rule(config: AverageConfig) -> OuterRule:
    given = {"lr": config.outer_lr, "momentum": config.outer_momentum}
    names = _FIELDS.get(config.outer, {})
    numbers = {names.get(n, n): value for n, value in given.items() if value != UNSET}
    return RULES[config.outer](**numbers)


def _read(flag: str, word: str) -> int | float | str:
    """Read the text of a flag as a value of the flag's type."""
    kind = type(getattr(AverageConfig, flag))
    try:
        value: int | float | str = kind(word)
    except ValueError:
        rule = "must be a whole number" if kind is int else "must be a number"
        raise ConfigError(flag=flag, value=word, rule=rule) from None
    if value == UNSET:
        raise ConfigError(flag=flag, value=word, rule="must not be negative")
    return value


def _argument(option: str) -> str:
    return ARGUMENTS.get(option, option)
