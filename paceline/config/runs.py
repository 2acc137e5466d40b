"""Configuration of `paceline runs` and `paceline compare`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from paceline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RunsConfig:
    """Options of `paceline runs`."""

    output_dir: str = "runs"
    """Folder of all runs."""

    json: bool = False
    """Print a JSON object for each run, one a line."""


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Options of `paceline compare`."""

    runs: Positional[Annotated[tuple[str, ...], arg(metavar="RUN RUN [RUN …]")]]
    """Folders or ids of the runs."""

    output_dir: str = "runs"
    """Folder of all runs."""

    json: bool = False
    """Print the result as JSON."""

    def __post_init__(self) -> None:
        if len(self.runs) < 2:
            raise ConfigError(
                "At least two runs are required, as in paceline compare runs/one runs/other."
            )
