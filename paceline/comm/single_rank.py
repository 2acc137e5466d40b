"""The communicator of a world of one rank: a sum is its only summand, and nothing is connected."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.comm.communicator import Ticket


class SingleRankCommunicator:
    """The only rank."""

    rank = 0
    world_size = 1

    def all_reduce(self, tensor: Tensor) -> Ticket:
        """Leave the tensor as it is: the sum over one rank."""
        return _Done()

    def broadcast(self, tensor: Tensor) -> Ticket:
        """Leave the tensor as it is: rank 0's."""
        return _Done()

    def reduce(self, tensor: Tensor) -> Ticket:
        """Leave the tensor as it is: the sum over one rank."""
        return _Done()

    def gather(self, tensor: Tensor, into: Sequence[Tensor]) -> Ticket:
        """Copy the tensor."""
        into[0].copy_(tensor)
        return _Done()

    def steady(self) -> None:
        """Change nothing: nobody is waited for."""

    def end(self) -> None:
        """Close nothing."""

    def close(self) -> None:
        """Close nothing."""


class _Done:
    def done(self) -> bool:
        """Be done."""
        return True

    def wait(self, operation: str) -> None:
        """Return at once."""
