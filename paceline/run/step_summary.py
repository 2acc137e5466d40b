"""Step summaries: sums over ranks, requests to stop, rank 0's request, acknowledged snapshots.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from paceline.comm.communicator import Communicator, Ticket

NONE_ACKNOWLEDGED: Sequence[bool] = (
    False,
    False,
)  # at most two snapshots are held and not committed
_MARKS = 10  # numbers behind the sums


@dataclass(frozen=True, kw_only=True)
class StepSummary:
    """Summary of a step over all ranks.

    Attributes:
        step: the step's number.
        sums: the ranks' values, summed.
        stop: whether any rank asks to stop.
        request: the request of rank 0.
        acknowledged: whether all ranks have acknowledged the first and the second of the snapshots
            that they hold and that aren't committed.
        interval: the interval between snapshots that rank 0 asks for; 0: it doesn't.
        same_outcome: whether the step ended alike on all ranks.
        checked: whether any rank checked the state before the step.
        same_state: whether all ranks reported the same code of it.
        check_interval: the interval between replica checks that rank 0 asks for; 0: it doesn't.
        times: the ranks' own times of the step in ms, (ranks,), 0 where a rank has none; () where
            they aren't measured.
    """

    step: int
    sums: tuple[float, ...]
    stop: bool
    request: int
    acknowledged: tuple[bool, ...]
    interval: int
    same_outcome: bool = True
    checked: bool = False
    same_state: bool = True
    check_interval: int = 0
    times: tuple[float, ...] = ()


class StepSummaries:
    """Step summaries: exchanges the ranks' step reports by asynchronous all-reduce.

    Attributes:
        communicator: connects the ranks.
        alone: whether this rank is the only one.
        waited: seconds that this rank has waited for summaries of measured steps.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator, self.alone = communicator, communicator.world_size == 1
        self._pending: deque[tuple[int, Tensor, Tensor, Ticket, int]] = deque()
        self.waited = 0.0

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
        acknowledged: Sequence[bool] = NONE_ACKNOWLEDGED,
        interval: int = 0,
        outcome: int = 0,
        code: int = 0,
        check_interval: int = 0,
        times: Sequence[float] = (),
    ) -> None:
        """Send this rank's values of a step, and its request; never blocks.

        Args:
            step: the step's number; larger than in the call before.
            sums: (values,) float64, on the communicator's device.
            stop: this rank asks to stop.
            request: rank 0's request; 0 on other ranks.
            acknowledged: (2,) whether this rank acknowledges the snapshots that aren't committed,
                the oldest first; the same ones on all ranks.
            interval: the interval between snapshots that rank 0 asks for; 0 on other ranks.
            outcome: how the step ended, below 2^20; the same on all ranks.
            code: of the state before the step, below 2^20; 0: it isn't checked.
            check_interval: the interval between replica checks that rank 0 asks for; 0 on others.
            times: (ranks,) this rank's own time of the step in ms, and 0 for the others; () where
                no rank measures the step.
        """
        marks = [*times, stop, request, *acknowledged, interval, check_interval]
        marks += [outcome, outcome**2, code, code**2]
        flat = torch.cat([sums, sums.new_tensor(marks)])
        ticket = self.communicator.all_reduce(flat)
        self._pending.append((step, sums, flat, ticket, len(times)))

    def receive(self, *, before: int) -> Iterator[StepSummary]:
        """Yield the summaries of steps below `before` that are not yielded yet; waits for them.

        Raises:
            CommError: a peer was lost, or silent.
        """
        while self._pending and self._pending[0][0] < before:
            step, _, flat, ticket, timed = self._pending.popleft()
            began = perf_counter() if timed else 0.0
            ticket.wait(f"the sums of step {step}")
            if timed:
                self.waited += perf_counter() - began
            numbers, ranks = flat.tolist(), self.communicator.world_size
            values = len(numbers) - _MARKS - timed
            stops, request, *counts, interval, check_interval = numbers[-_MARKS:-4]
            codes = numbers[-4:]
            yield StepSummary(
                step=step,
                sums=tuple(numbers[:values]),
                stop=stops > 0,
                request=int(request),
                acknowledged=tuple(count == ranks for count in counts),
                interval=int(interval),
                same_outcome=all_equal(codes[0], codes[1], ranks),
                checked=codes[2] > 0,
                same_state=all_equal(codes[2], codes[3], ranks),
                check_interval=int(check_interval),
                times=tuple(numbers[values:-_MARKS]),
            )


def all_equal(total: float, squares: float, count: int) -> bool:
    """Return whether so many whole numbers are equal, by their sum and the sum of their squares.

    Both sums are exact below 2^53: for numbers below 2^20, up to 2^13 of them. By Cauchy's and
    Schwarz's inequality, count * squares = total^2 only if all numbers are equal.
    """
    return count * int(squares) == int(total) ** 2
