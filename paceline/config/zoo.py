"""Configuration of `paceline zoo`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg


@dataclass(frozen=True, kw_only=True)
class ZooConfig:
    """Options of `paceline zoo`."""

    pattern: Positional[Annotated[str, arg(metavar="PATTERN")]] = "*"
    """Names to list, in which * is any text."""

    json: bool = False
    """Print a JSON object for each model, one a line."""
