"""Communicator of a world of one rank: a sum is its only summand; there are no connections."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.comm.communicator import Ticket


class SingleRankCommunicator:
    """Communicator of a world of size 1."""

    rank = 0
    world_size = 1

    def all_reduce(self, tensor: Tensor) -> Ticket:
        """Leave the tensor as it is: the sum over one rank, and rank 0's."""
        return _Done()

    broadcast = reduce = all_reduce

    def gather(self, tensor: Tensor, into: Sequence[Tensor]) -> Ticket:
        """Copy the tensor."""
        into[0].copy_(tensor)
        return _Done()

    all_gather = gather

    def end_startup(self) -> None:
        """Change nothing: there is no wait."""

    def close(self) -> None:
        """Close nothing."""

    def abort(self) -> None:
        """Close nothing."""

    interrupt = abort


class _Done:
    """Handle of a completed collective."""

    def done(self) -> bool:
        """Return True."""
        return True

    def wait(self, operation: str) -> None:
        """Return at once."""
