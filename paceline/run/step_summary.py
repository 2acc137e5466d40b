"""What all ranks learn of a step: its sums, whether anybody wishes to stop, what rank 0 wishes.

Each rank tells a few numbers after its part of a step; an all_reduce adds them up while the next
step computes, and is heard one step later, so that nobody waits for it:

    step n      … end, tell(n)
    step n + 1  hear(before=n) ── tells of n - 1 ── begin …

All ranks tell the same steps in the same order, after all buckets of the step, so the collectives
match. What is heard is bit for bit the same everywhere: decisions that follow from it need no
further word.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm.communicator import Communicator, Ticket


@dataclass(frozen=True, kw_only=True)
class StepSummary:
    """A step as all ranks know it.

    Attributes:
        step: its number.
        sums: what the ranks told, added up.
        stop: somebody wishes to stop.
        request: rank 0's.
    """

    step: int
    sums: tuple[float, ...]
    stop: bool
    request: int


class StepSummaries:
    """Adds up what the ranks tell of each step.

    Args:
        communicator: the ranks.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._told: deque[tuple[int, Tensor, Ticket]] = deque()

    @property
    def alone(self) -> bool:
        """Whether there is nobody to agree with."""
        return self._communicator.world_size == 1

    def of_rank_0(self, values: Sequence[int], device: torch.device) -> list[int]:
        """Return rank 0's values; collective.

        Raises:
            CommError: a peer was lost, or silent.
        """
        told = torch.tensor(values, dtype=torch.int64, device=device)
        self._communicator.broadcast(told).wait("what rank 0 decides")
        return [int(value) for value in told.tolist()]

    def tell(self, step: int, sums: Tensor, *, stop: bool, request: int = 0) -> None:
        """Send this rank's part of a step's sums, and its wish; never blocks.

        Args:
            step: the step's number; larger than the one told before.
            sums: (values,) float64, on the communicator's device.
            stop: this rank wishes to stop.
            request: what rank 0 wishes of all; others' 0.
        """
        flat = torch.cat([sums, sums.new_tensor([stop, request])])
        self._told.append((step, flat, self._communicator.all_reduce(flat)))

    def hear(self, *, before: int) -> Iterator[StepSummary]:
        """Yield what was told of the steps below `before` and not heard yet; waits for it.

        Raises:
            CommError: a peer was lost, or silent.
        """
        while self._told and self._told[0][0] < before:
            step, flat, ticket = self._told.popleft()
            ticket.wait(f"the sums of step {step}")
            *values, stops, request = flat.tolist()
            yield StepSummary(step=step, sums=tuple(values), stop=stops > 0, request=int(request))
