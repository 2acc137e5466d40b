"""Configuration of `paceline runs`, `paceline compare` and `paceline plot`."""

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


@dataclass(frozen=True, kw_only=True)
class PlotConfig:
    """Options of `paceline plot`."""

    runs: Positional[Annotated[tuple[str, ...], arg(metavar="RUN [RUN …]")]]
    """Folders or ids of the runs."""

    output: str = "plot.png"
    """File to write. NAME.png: a picture. NAME.html: a page for a
    browser, which needs no other file."""

    output_dir: str = "runs"
    """Folder of all runs."""

    json: bool = False
    """Print the curves as JSON, and draw nothing."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ConfigError("A run is required, as in paceline plot runs/my-run.")
        if not self.output.lower().endswith((".png", ".html")):
            raise ConfigError(
                flag="output",
                value=self.output,
                rule="must end in .png or .html",
                remedy="give a name such as plot.png",
            )
