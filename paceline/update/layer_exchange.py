"""What a rank's layers know of the step that runs, and how they reach their peers."""

from __future__ import annotations

from torch import Tensor

from paceline.comm.communicator import Communicator


class BatchShare:
    """This rank's share of the running step's global batch.

    Attributes:
        weight: local samples / global samples, as in `Synchronizer.begin`; 0 where the rank
            computes a borrowed sample for nothing, and 1 on all ranks outside a step.
        begun: steps that have begun.
    """

    def __init__(self) -> None:
        self.weight = 1.0
        self.begun = 0

    def begin(self, weight: float) -> None:
        """Start a step."""
        self.weight = weight
        self.begun += 1

    def end(self) -> None:
        """End the step."""
        self.weight = 1.0


class LayerCommunicator:
    """The layers' connection to their peers, and what this rank counts."""

    def __init__(self, communicator: Communicator, share: BatchShare) -> None:
        self._communicator = communicator
        self._share = share

    def __deepcopy__(self, memo: object) -> LayerCommunicator:
        """Stay one: a copy of the model has the same peers."""
        return self

    @property
    def weight(self) -> float:
        """What this rank's loss counts in the running step."""
        return self._share.weight

    def sum(self, tensor: Tensor, operation: str) -> Tensor:
        """Replace `tensor` by its sum over the ranks and return it; collective.

        Raises:
            CommError: a peer was lost, or silent.
        """
        if self._share.begun > 1:  # all ranks have come, and compiled what they compile
            self._communicator.steady()
        self._communicator.all_reduce(tensor).wait(operation)
        return tensor

    def gather(self, row: Tensor, operation: str) -> Tensor:
        """Return all ranks' rows, (world_size, values), of this rank's `row`, (values,)."""
        rows = row.new_zeros(self._communicator.world_size, row.numel())
        rows[self._communicator.rank] = row
        return self.sum(rows, operation)  # with zeros: exact
