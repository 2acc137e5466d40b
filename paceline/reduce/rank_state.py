"""The `RankState` protocol: state that is divided among ranks, and gathered in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from paceline.comm.communicator import Communicator

OPTIMIZER = "optimizer"  # key of the optimizer's whole state dict, where ranks hold shards of it
MISSED = "missed"  # key of the error-feedback residuals


class RankState(Protocol):
    """Protocol of state that is divided among ranks; a checkpoint gathers and restores it."""

    def gather(self, communicator: Communicator) -> Mapping[str, Any] | None:
        """Return all ranks' state on rank 0, None elsewhere; collective, when all have settled.

        Raises:
            CommError: a peer was lost, or a wait timed out.
        """

    @property
    def scaled(self) -> bool:
        """Whether it follows the scale of the loss."""

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Take this rank's share of what `gather` returned, in this world or another.

        Returns:
            False where some of it had to be dropped.
        """
