"""Configuration of `paceline stop` and `paceline status`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from paceline.config.rules import positive


@dataclass(frozen=True, kw_only=True)
class StopConfig:
    """Options of `paceline stop`."""

    run: Positional[Annotated[str, arg(metavar="RUN")]]
    """Folder or id of the run."""

    output_dir: str = "runs"
    """Folder of all runs."""

    timeout: float = 30.0
    """Seconds to wait for the end of the run's processes on this machine."""

    def __post_init__(self) -> None:
        positive("timeout", self.timeout)


@dataclass(frozen=True, kw_only=True)
class StatusConfig:
    """Options of `paceline status`."""

    run: Positional[Annotated[str, arg(metavar="RUN")]]
    """Folder or id of the run."""

    output_dir: str = "runs"
    """Folder of all runs."""

    json: bool = False
    """Print the status as JSON."""
