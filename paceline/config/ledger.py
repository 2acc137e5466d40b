"""Configuration of `paceline ledger`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from paceline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LedgerConfig:
    """Options of `paceline ledger`."""

    runs: Positional[Annotated[tuple[str, ...], arg(metavar="RUN [RUN …]")]]
    """Folder or id of the run. With several machines: its folder on each machine."""

    output_dir: str = "runs"
    """Folder of all runs."""

    json: bool = False
    """Print the result as JSON."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ConfigError(
                "A run folder or run id is required, as in paceline ledger runs/my-run."
            )
