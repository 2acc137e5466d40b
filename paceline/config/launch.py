"""Configuration of `paceline launch`: the world, and nothing of the workers' command."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.config.world import WorldConfig


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Options of `paceline launch`."""

    world: WorldConfig = field(default_factory=WorldConfig)
