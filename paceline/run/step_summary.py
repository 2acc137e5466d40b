"""Step summaries: sums over ranks, requests to stop, rank 0's request, snapshots that all hold.

Each rank reports a few numbers after its slice of a step. An all-reduce sums them while the next
step computes, and is received one step later, so that no rank waits for it:

    step n      … end, send(n)
    step n + 1  receive(before=n): summary of n - 1 ── begin …

All ranks report the same steps in the same order, after all buckets of the step, so the collectives
match. A summary is bit for bit the same on all ranks: decisions that follow from it need no
further agreement.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm.communicator import Communicator, Ticket


@dataclass(frozen=True, kw_only=True)
class StepSummary:
    """Summary of a step over all ranks.

    Attributes:
        step: the step's number.
        sums: the ranks' values, summed.
        stop: whether any rank asks to stop.
        request: the request of rank 0.
        held: whether all ranks hold a snapshot of the state before the step.
        interval: the interval between snapshots that rank 0 asks for; 0: it doesn't.
    """

    step: int
    sums: tuple[float, ...]
    stop: bool
    request: int
    held: bool
    interval: int


class StepSummaries:
    """Step summaries: exchanges the ranks' step reports by asynchronous all-reduce.

    Attributes:
        communicator: connects the ranks.
        alone: whether this rank is the only one.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator, self.alone = communicator, communicator.world_size == 1
        self._pending: deque[tuple[int, Tensor, Tensor, Ticket]] = deque()

    @property
    def sent(self) -> list[tuple[int, Tensor]]:
        """This rank's values of the steps whose summaries haven't been received: (step, sums)."""
        return [(step, sums) for step, sums, *_ in self._pending]

    def send(
        self,
        step: int,
        sums: Tensor,
        *,
        stop: bool,
        request: int = 0,
        held: bool = False,
        interval: int = 0,
    ) -> None:
        """Send this rank's values of a step, and its request; never blocks.

        Args:
            step: the step's number; larger than in the call before.
            sums: (values,) float64, on the communicator's device.
            stop: this rank asks to stop.
            request: rank 0's request; 0 on other ranks.
            held: this rank holds a snapshot of the state before the step.
            interval: the interval between snapshots that rank 0 asks for; 0 on other ranks.
        """
        flat = torch.cat([sums, sums.new_tensor([stop, request, held, interval])])
        self._pending.append((step, sums, flat, self.communicator.all_reduce(flat)))

    def receive(self, *, before: int) -> Iterator[StepSummary]:
        """Yield the summaries of steps below `before` that are not yielded yet; waits for them.

        Raises:
            CommError: a peer was lost, or silent.
        """
        while self._pending and self._pending[0][0] < before:
            step, _, flat, ticket = self._pending.popleft()
            ticket.wait(f"the sums of step {step}")
            *values, stops, request, held, interval = flat.tolist()
            yield StepSummary(
                step=step,
                sums=tuple(values),
                stop=stops > 0,
                request=int(request),
                held=held == self.communicator.world_size,
                interval=int(interval),
            )
