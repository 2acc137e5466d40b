"""Configuration of `paceline launch`: the world, and nothing of the workers' command."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.config.rules import at_least
from paceline.config.world import WorldConfig


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Options of `paceline launch`."""

    num_servers: int = 0
    """Number of parameter servers to start on machine 0, for a script with sync="server"."""

    world: WorldConfig = field(default_factory=WorldConfig)

    def __post_init__(self) -> None:
        at_least(self, 0, "num_servers")
