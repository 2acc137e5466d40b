"""Protocols of objects with a state dict: models, optimizers, schedules, loss scalers."""

from __future__ import annotations

from typing import Any, Protocol


class Stateful(Protocol):
    """Protocol of objects whose state is saved."""

    def state_dict(self) -> Any:
        """Return the state: tensors and plain values by name."""


class Restorable(Stateful, Protocol):
    """Protocol of objects whose state is saved and restored: optimizers, schedulers, scalers."""

    def load_state_dict(self, state: Any) -> Any:
        """Restore a state."""
