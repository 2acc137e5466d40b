"""The `RankState` protocol: state that is divided among ranks, and gathered in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from paceline.comm.communicator import Communicator

OPTIMIZER = "optimizer"  # key of the optimizer's whole state dict, where ranks hold shards of it
MISSED = "missed"  # key of the error-feedback residuals


Ranges = Mapping[str, tuple[int, int, Any]]
"""What a rank has of each parameter: (start, stop, values), a range of its values, and these."""


def same_ranges(one: Ranges, other: Ranges) -> bool:
    """Tell whether both have the same ranges of the same parameters."""
    ranges = [{name: entry[:2] for name, entry in own.items()} for own in (one, other)]
    return ranges[0] == ranges[1]


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

    def local(self) -> Mapping[str, Any]:
        """Return this rank's own part, by parameter, of the state before the step that runs.

        It is called when the step's buckets are sent, and before `Synchronizer.end` or `abandon`.
        The tensors are views of the state itself, to be copied before the next step begins.
        """

    def restore_local(self, state: Mapping[str, Any]) -> bool:
        """Take a copy of what `local` returned, before a step begins; the copy stays as it is.

        Returns:
            False where this rank's part is another now (other buckets, ranks or machines): then the
            parts of all ranks must be divided anew.
        """
