"""What `paceline ledger` is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from paceline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LedgerConfig:
    """Which run is accounted for."""

    runs: Positional[Annotated[tuple[str, ...], arg(metavar="RUN [RUN …]")]]
    """A run's folder, or its id; the folders of its machines."""

    output_dir: str = "runs"
    """Folder of all runs."""

    json: bool = False
    """Print the proof for machines."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ConfigError("paceline ledger: no run is given; give a run's folder, or its id.")
