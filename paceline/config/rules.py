"""Rules that several flags share; each raises an error with value, rule and remedy."""

from __future__ import annotations

import math

from paceline.errors import ConfigError


def at_least(config: object, low: float, *flags: str, remedy: str = "") -> None:
    """Require `value >= low`, and finite, of some flags of a configuration.

    Raises:
        ConfigError: one isn't.
    """
    for flag in flags:
        value = getattr(config, flag)
        if not low <= value < math.inf:
            rule = f"must be at least {low}" + (" and finite" if value > low else "")
            raise ConfigError(flag=flag, value=value, rule=rule, remedy=remedy)


def whole(flag: str, value: object, low: int) -> None:
    """Require a whole number of at least `low`.

    Raises:
        ConfigError: it isn't.
    """
    if type(value) is not int or value < low:
        rule = f"must be a whole number of at least {low}"
        raise ConfigError(flag=flag, value=value, rule=rule)


def within(flag: str, value: float, low: float, high: float, remedy: str = "") -> None:
    """Require `low <= value < high`.

    Raises:
        ConfigError: it is outside.
    """
    if not low <= value < high:
        whole = all(isinstance(number, int) for number in (value, low, high))
        rule = f"from {low} to {high - 1}" if whole else f"at least {low} and less than {high}"
        raise ConfigError(flag=flag, value=value, rule=f"must be {rule}", remedy=remedy)


_SILENCE_S = 1.0  # at least, before a process that sends heartbeats counts as lost


def positive(flag: str, value: float) -> None:
    """Require `value > 0`, and finite.

    Raises:
        ConfigError: it isn't.
    """
    if not 0 < value < math.inf:
        rule = "must be greater than 0" + (" and finite" if value > 0 else "")
        raise ConfigError(flag=flag, value=value, rule=rule)


def silence(flag: str, value: float) -> None:
    """Require a number of seconds, finite, in which several heartbeats come on a busy machine.

    Raises:
        ConfigError: it isn't.
    """
    positive(flag, value)
    if value < _SILENCE_S:
        remedy = "heartbeats come twice a second, and later on a busy machine"
        raise ConfigError(flag=flag, value=value, rule="must be at least 1", remedy=remedy)


def file_name(flag: str, value: str) -> None:
    """Require a name that a file or folder can have, and a user can read.

    Raises:
        ConfigError: it has slashes, line breaks or the like, only blanks or dots, or is too long.
    """
    if "/" in value or "\\" in value or not value.isprintable() or not value.strip(" ."):
        remedy = r"use printable characters except / and \, and not only blanks and dots"
        raise _unfit_name(flag, repr(value), remedy)
    if len(value.encode()) > 200:
        raise _unfit_name(flag, f"{value[:20]}…", "use at most 200 bytes in UTF-8")


def _unfit_name(flag: str, value: str, remedy: str) -> ConfigError:
    return ConfigError(
        flag=flag, value=value, rule="the value is used as a file name", remedy=remedy
    )
