"""Rules that several flags share; each raises a sentence with value, rule and remedy."""

from __future__ import annotations

from paceline.errors import ConfigError


def at_least(flag: str, value: float, low: float, remedy: str = "") -> None:
    """Require `value >= low`.

    Raises:
        ConfigError: it is smaller.
    """
    if not value >= low:
        raise ConfigError(_sentence(flag, value, f"must be at least {low}", remedy))


def within(flag: str, value: float, low: float, high: float, remedy: str = "") -> None:
    """Require `low <= value < high`.

    Raises:
        ConfigError: it is outside.
    """
    if not low <= value < high:
        raise ConfigError(_sentence(flag, value, f"must be in [{low}, {high})", remedy))


def positive(flag: str, value: float, remedy: str = "") -> None:
    """Require `value > 0`.

    Raises:
        ConfigError: it is zero, negative or not a number.
    """
    if not value > 0:
        raise ConfigError(_sentence(flag, value, "must be greater than 0", remedy))


def _sentence(flag: str, value: float, rule: str, remedy: str) -> str:
    return f"--{flag} {value}: {rule}" + (f"; {remedy}." if remedy else ".")
