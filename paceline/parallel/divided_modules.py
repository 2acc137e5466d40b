"""Modules of which tensor ranks have shards, found without DTensors, whose import takes seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

WHOLES = "_paceline_wholes"
"""Attribute of a divided module's class: a `Whole` (`shards.py`) by the parameter's name."""


def wholes_of(module: nn.Module) -> Mapping[str, Any]:
    """Return what a module's own parameters are shards of, by name."""
    wholes: Mapping[str, Any] = getattr(type(module), WHOLES, {})
    return wholes


def divided_dims(model: nn.Module) -> dict[str, int]:
    """Return the dimension along which the ranks have different parts, by a parameter's path."""
    return {
        f"{path}.{name}" if path else name: placement.dim
        for path, module in model.named_modules(remove_duplicate=False)
        for name, whole in wholes_of(module).items()
        for placement in whole.placements
        if placement.is_shard()
    }
