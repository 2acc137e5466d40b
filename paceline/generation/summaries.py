"""Step summaries: sums over ranks, requests to stop, rank 0's request, acknowledged snapshots.

Each rank reports a few numbers after its slice of a step. All ranks gather them while the next step
computes, and add them up in rank order one step later, so that no rank waits for them:

    step n      … end, send(n)
    step n + 1  receive(before=n): summary of n - 1 ── begin …

All ranks report the same steps in the same order, after all buckets of the step, so the collectives
match. A summary is bit for bit the same on all ranks: decisions that follow from it need no
further agreement.

A GPU computes a step's sums long after the host has queued the step. So they are copied to this
machine's memory behind the step, and the sum over the ranks begins once the copy is there: a thread
waits for that, since the host has other work, and rank 0 alone may ask for the last summary, when
it saves. It has a communicator of its own, whose order is that of the steps. A rank alone reads the
copy a step later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from functools import reduce
from itertools import chain, islice
from queue import SimpleQueue
from threading import Thread

import torch
from torch import Tensor

from paceline.comm.communicator import Communicator, Ticket
from paceline.comm.host_copy import HostCopy
from paceline.comm.peer_activities import NO_PEERS, PeerActivities, Timeout
from paceline.errors import CommTimeout, ConfigError
from paceline.timeline.timeline import WAIT_FOR_SUMMARY, Timeline

NONE_ACKNOWLEDGED: Sequence[bool] = (False, False)  # two are held and not committed at most
_MARKS = 10  # numbers behind the sums
_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class StepSummary:
    """Summary of a step over all ranks.

    Attributes:
        sums: the ranks' values, summed.
        stop: whether any rank asks to stop.
        request: the request of rank 0.
        acknowledged: whether all ranks have acknowledged the first and the second of the snapshots
            that they hold and that aren't committed.
        interval: the interval between snapshots that rank 0 asks for; 0: it doesn't.
        same_outcome: whether the step ended alike on all ranks.
        checked: whether any rank checked the state before the step.
        same_state: whether all ranks whose state is equal reported the same code of it.
        check_interval: the interval between replica checks that rank 0 asks for; 0: it doesn't.
        rows: of each extension of the steps, summed over the ranks; (): of a lost generation's.
        written: the number of completed steps in the newest checkpoint of which all parts are
            written; 0 where they aren't of one.
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
    rows: tuple[tuple[float, ...], ...] = ()
    written: int = 0


class StepSummaries:
    """Step summaries: exchanges the ranks' step reports by asynchronous all-gather.

    Args:
        communicator: connects the ranks; with several ranks on GPUs, for summaries alone.
        device: the device that computes the sums.
        limits: seconds to wait for the device or a peer: at the start, and in later steps.
        activities: what the peers do, for which a device may wait.
        timeline: measures the waits; None: nothing does.
        replicas: groups of ranks whose state is equal; (): that of all ranks is.

    Attributes:
        communicator: connects the ranks.
        alone: whether this rank is the only one.
        lag: steps that a rank begins before it needs a step's summary: 1, because the summary still
            travels, or a GPU computes it; more where ranks may lead by several steps.
    """

    def __init__(
        self,
        communicator: Communicator,
        device: torch.device = _CPU,
        limits: tuple[float, float] = (60.0, 60.0),
        activities: PeerActivities = NO_PEERS,
        timeline: Timeline | None = None,
        *,
        replicas: Sequence[Sequence[int]] = (),
    ) -> None:
        self.communicator = communicator
        self._replicas = [list(ranks) for ranks in replicas or [range(communicator.world_size)]]
        self._timeline = timeline or Timeline()
        self.alone = communicator.world_size == 1
        self.lag = 0 if self.alone and device.type == "cpu" else 1
        self._timeout = Timeout(*limits, activities)
        self._pending: deque[_Pending] = deque()
        self._reports: SimpleQueue[_Pending | None] | None = None
        if device.type != "cpu" and not self.alone:
            self._reports = SimpleQueue()
            Thread(target=self._send_reports, name="summaries", daemon=True).start()

    def allow_lead(self, steps: int, communicator: Communicator) -> None:
        """Let this rank lead the others by so many steps (bounded staleness); all ranks call it.

        Args:
            communicator: connects the ranks for summaries alone: where ranks are in different
                steps, no order of summaries and other collectives is the same on all.
        """
        self.communicator = communicator
        if not self.alone:
            self.lag = steps + 1

    @property
    def sent(self) -> list[tuple[int, Tensor]]:
        """This rank's values of the steps whose summaries haven't been received: (step, sums)."""
        return [(one.step, one.sums) for one in self._pending]

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
        rows: Sequence[Sequence[float]] = (),
        written: int = 0,
    ) -> None:
        """Send this rank's values of a step, and its request; never blocks.

        Args:
            step: the step's number; larger than in the call before.
            sums: (values,) float64.
            stop: this rank asks to stop.
            request: rank 0's request; 0 on other ranks.
            acknowledged: (2,) whether this rank acknowledges the snapshots that aren't committed,
                the oldest first; the same ones on all ranks.
            interval: the interval between snapshots that rank 0 asks for; 0 on other ranks.
            outcome: how the step ended, below 2^20; the same on all ranks.
            code: of the state before the step, below 2^20; 0: it isn't checked.
            check_interval: the interval between replica checks that rank 0 asks for; 0 on others.
            rows: this rank's row of each extension; as many, and as long, on all ranks.
            written: the number of completed steps in the newest file of this rank's part of a
                checkpoint; 0: there is none.
        """
        marks = [*chain(*rows), stop, request, *acknowledged, interval, check_interval]
        marks += [outcome, outcome**2, code, written]
        pending = _Pending(
            step=step,
            sums=sums,
            copy=HostCopy(sums),
            marks=marks,
            lengths=[len(row) for row in rows],
        )
        self._pending.append(pending)
        if self._reports is not None:
            pending.future = Future()
            self._reports.put(pending)
        elif not self.alone:
            self._start(pending)

    def receive(self, *, before: int) -> Iterator[StepSummary]:
        """Yield the summaries of steps below `before` that are not yielded yet; waits for them.

        Raises:
            ConfigError: the ranks made different steps.
            CommError: a peer was lost, or silent.
        """
        while self._pending and self._pending[0].step < before:
            pending = self._pending.popleft()
            with self._timeline.span(WAIT_FOR_SUMMARY):
                numbers = self._numbers(pending)
            ranks = self.communicator.world_size
            rest = iter(numbers)
            sums = tuple(islice(rest, len(pending.sums)))
            rows = tuple(tuple(islice(rest, length)) for length in pending.lengths)
            stops, request, *counts, interval, check_interval = numbers[-_MARKS:-4]
            outcomes, squares, codes, _ = numbers[-4:]
            yield StepSummary(
                step=pending.step,
                sums=sums,
                stop=stops > 0,
                request=int(request),
                acknowledged=tuple(count == ranks for count in counts),
                interval=int(interval),
                same_outcome=all_equal(outcomes, squares, ranks),
                checked=codes > 0,
                same_state=self._same_state(pending),
                check_interval=int(check_interval),
                rows=rows,
                written=self._written(pending),
            )

    def _same_state(self, pending: _Pending) -> bool:
        """Return whether ranks whose state is equal reported the same code of it."""
        if pending.rows is None:
            return True
        codes = pending.rows[:, -2]
        return all(len(codes[ranks].unique()) == 1 for ranks in self._replicas)

    def _written(self, pending: _Pending) -> int:
        """Return the steps in the newest files of the first ranks of replicas; 0: they differ."""
        if pending.rows is None:
            return 0
        newest = {*pending.rows[[ranks[0] for ranks in self._replicas], -1].tolist()}
        return int(newest.pop()) if len(newest) == 1 else 0

    def end_startup(self) -> None:
        """Use the shorter timeout from now on."""
        self._timeout.end_startup()
        self.communicator.end_startup()

    def close(self) -> None:
        """Let the thread end."""
        if self._reports is not None:
            self._reports.put(None)

    def _start(self, pending: _Pending) -> None:
        """Start to gather the ranks' rows, once the device has computed this rank's values."""
        row = torch.tensor([pending.step, *self._own(pending)], dtype=torch.float64)
        pending.rows = row.new_empty(self.communicator.world_size, len(row))
        pending.ticket = self.communicator.all_gather(row, [*pending.rows])

    def _numbers(self, pending: _Pending) -> list[float]:
        """Return the sums over the ranks of a step's values and marks."""
        if self.alone:
            return self._own(pending)
        if pending.future is None:
            return pending.received()
        seconds = 2 * self._timeout.seconds  # for the device, then for the peers
        with self._timeout.limit(pending.operation, seconds) as limit:
            while True:
                try:
                    return pending.future.result(limit.slice())
                except FutureTimeout as error:
                    if pending.future.done():
                        continue
                    if limit.look():
                        text = f"{pending.operation} weren't sent in time: a GPU hangs."
                        raise CommTimeout(text) from error

    def _own(self, pending: _Pending) -> list[float]:
        """Return this rank's values and marks, once the device has computed them."""
        limit = self._timeout.limit(pending.operation)
        return [*pending.copy.values(limit), *pending.marks]

    def _send_reports(self) -> None:
        """Send the reports of a GPU's steps, in their order; the summaries' thread."""
        assert self._reports is not None
        while (pending := self._reports.get()) is not None:
            assert pending.future is not None
            try:
                self._start(pending)
                pending.future.set_result(pending.received())
            except BaseException as error:
                pending.future.set_exception(error)


@dataclass(kw_only=True, eq=False)
class _Pending:
    """Report of a step whose summary hasn't been received.

    Attributes:
        sums: this rank's values, on the device.
        copy: they, in this machine's memory.
        marks: what the host reports.
        lengths: of the rows that the marks begin with.
        rows: (ranks, step, values and marks), of all ranks; gathered, because Gloo takes longer
            to add up so few numbers.
        ticket: of the gather.
        future: what the summaries' thread has received; None: there is no thread.
    """

    step: int
    sums: Tensor
    copy: HostCopy
    marks: Sequence[float]
    lengths: Sequence[int]
    rows: Tensor | None = None
    ticket: Ticket | None = None
    future: Future[list[float]] | None = None

    @property
    def operation(self) -> str:
        """What errors call the sum."""
        return f"the sums of step {self.step}"

    def received(self) -> list[float]:
        """Wait for all ranks' rows; return their sum, in rank order.

        Raises:
            ConfigError: the ranks are in different steps.
            CommError: as `Ticket.wait`.
        """
        assert self.ticket is not None
        assert self.rows is not None
        self.ticket.wait(self.operation)
        steps = self.rows[:, 0].long().tolist()
        if len({*steps}) > 1:
            raise _apart(steps)
        numbers: list[float] = reduce(torch.add, self.rows[:, 1:]).tolist()
        return numbers


def _apart(steps: Sequence[int]) -> ConfigError:
    """Return the error of ranks that made different steps together."""
    ahead = max(range(len(steps)), key=steps.__getitem__)
    behind = min(range(len(steps)), key=steps.__getitem__)
    return ConfigError(
        f"rank {ahead} made step {steps[ahead]} while rank {behind} made step {steps[behind]}: all "
        f"ranks must train the same batches, but rank {ahead} has left one out (by `continue`, "
        "say). To skip a batch on some ranks, pass world.step(weight=…) on all, which is 0 there; "
        "or decide by what is the same on all, such as a world.total()."
    )


def all_equal(total: float, squares: float, count: int) -> bool:
    """Return whether so many whole numbers are equal, by their sum and the sum of their squares.

    Both sums are exact below 2^53: for numbers below 2^20, up to 2^13 of them. By Cauchy's and
    Schwarz's inequality, count * squares = total^2 only if all numbers are equal.
    """
    return count * int(squares) == int(total) ** 2
