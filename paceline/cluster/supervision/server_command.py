"""The servers that a supervisor starts beside its workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cluster.rendezvous.server_registration import AVERAGING


@dataclass(frozen=True, kw_only=True)
class ServerCommand:
    """Command of servers; their local ranks follow the workers'.

    Attributes:
        role: what they are.
        count: how many to start.
    """

    argv: Sequence[str]
    role: str
    count: int

    def name(self, number: int) -> str:
        """Return what messages call one of them."""
        return f"the {self.role}" if self.count == 1 else f"{self.role} {number + 1}"

    def after_loss(self, workers: int) -> str:
        """Return what so many workers do without one, a sentence."""
        if self.role == AVERAGING or workers == 1:
            return "The workers save their state, and the run ends."
        return "The workers continue without it."
