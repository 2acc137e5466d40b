"""State of which each rank has a part: it is gathered for a checkpoint, and dealt out again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from paceline.comm.communicator import Communicator

OPTIMIZER = "optimizer"  # in a state: the optimizer's, plain, where the ranks have shares of it


class RankState(Protocol):
    """State of which each rank has a part, besides model and optimizer."""

    def gather(self, communicator: Communicator) -> Mapping[str, Any] | None:
        """Return all ranks' on rank 0, None elsewhere; collective, when all have settled.

        Raises:
            CommError: a peer was lost, or silent.
        """

    @property
    def scaled(self) -> bool:
        """Whether it follows the loss's scale."""

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Take this rank's part of what `gather` returned, in this world or another.

        Returns:
            False where something of it had to be dropped.
        """
