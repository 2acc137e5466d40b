"""What `paceline launch` is told: the world, and nothing of what its workers do."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.config.world import WorldConfig


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Workers for a command of somebody's own."""

    world: WorldConfig = field(default_factory=WorldConfig)
