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

_MARKS = 9  # numbers behind the sums


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
        same_outcome: whether the step ended alike on all ranks.
        checked: whether any rank checked the state before the step.
        same_state: whether all ranks reported the same code of it.
        check_interval: the interval between replica checks that rank 0 asks for; 0: it doesn't.
    """

    step: int
    sums: tuple[float, ...]
    stop: bool
    request: int
    held: bool
    interval: int
    same_outcome: bool = True
    checked: bool = False
    same_state: bool = True
    check_interval: int = 0


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
        outcome: int = 0,
        code: int = 0,
        check_interval: int = 0,
    ) -> None:
        """Send this rank's values of a step, and its request; never blocks.

        Args:
            step: the step's number; larger than in the call before.
            sums: (values,) float64, on the communicator's device.
            stop: this rank asks to stop.
            request: rank 0's request; 0 on other ranks.
            held: this rank holds a snapshot of the state before the step.
            interval: the interval between snapshots that rank 0 asks for; 0 on other ranks.
            outcome: how the step ended, below 2^20; the same on all ranks.
            code: of the state before the step, below 2^20; 0: it isn't checked.
            check_interval: the interval between replica checks that rank 0 asks for; 0 on others.
        """
        marks = [stop, request, held, interval, check_interval]
        marks += [outcome, outcome**2, code, code**2]
        flat = torch.cat([sums, sums.new_tensor(marks)])
        self._pending.append((step, sums, flat, self.communicator.all_reduce(flat)))

    def receive(self, *, before: int) -> Iterator[StepSummary]:
        """Yield the summaries of steps below `before` that are not yielded yet; waits for them.

        Raises:
            CommError: a peer was lost, or silent.
        """
        while self._pending and self._pending[0][0] < before:
            step, _, flat, ticket = self._pending.popleft()
            ticket.wait(f"the sums of step {step}")
            numbers, ranks = flat.tolist(), self.communicator.world_size
            stops, request, held, interval, check_interval, *codes = numbers[-_MARKS:]
            yield StepSummary(
                step=step,
                sums=tuple(numbers[:-_MARKS]),
                stop=stops > 0,
                request=int(request),
                held=held == ranks,
                interval=int(interval),
                same_outcome=all_equal(codes[0], codes[1], ranks),
                checked=codes[2] > 0,
                same_state=all_equal(codes[2], codes[3], ranks),
                check_interval=int(check_interval),
            )


def all_equal(total: float, squares: float, count: int) -> bool:
    """Return whether so many whole numbers are equal, by their sum and the sum of their squares.

    Both sums are exact below 2^53: for numbers below 2^20, up to 2^13 of them. By Cauchy's and
    Schwarz's inequality, count * squares = total^2 only if all numbers are equal.
    """
    return count * int(squares) == int(total) ** 2
