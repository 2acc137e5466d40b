"""Exchange of row-sparse gradients: an all-gather of rows of any number, in a thread of its own.

    the thread that computes    … rows ──┐                            ┌─ wait: the sum
    the row thread                       └ all-gather, all-gather, sum ┘

The first message of each rank has its number of rows, and as many rows as the exchange before lets
expect. Only where a rank has more, a second message brings the rest. How large that is, a rank
learns from the first messages: it can't be sent before. The thread sends it, so that it doesn't
wait for this rank's next forward, and no wait of one rank depends on another rank's calls.

All ranks send in one order, the tables by their numbers, over connections of their own.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.comm.communicator import Communicator
from paceline.reduce.side_stream import SideStream
from paceline.reduce.sparse_rows import RowMessages, SparseRows, Table, rows_of, sum_rows
from paceline.timeline.timeline import Timeline

_CLOSE_S = 5.0
_RESERVE = 16  # messages have room for 1/16 more rows than the exchange before had at most


@dataclass(kw_only=True, eq=False)
class _Transfer:
    """Version of a table's exchange.

    Attributes:
        rows: this rank's rows.
        operation: its name, for errors.
        event: of the computing stream, when the rows are there.
        sum: what the row thread returns: the sum, and the bytes that this rank sent.
    """

    table: int
    rows: SparseRows
    operation: str
    event: Any
    sum: Future[tuple[Tensor | None, int]] = field(default_factory=Future)


class RowExchange:
    """Exchange of row-sparse gradients, one bucket a table.

    Args:
        parameters: the tables, (rows, …) each.
        communicator: connects all ranks; used by this exchange alone, and aborted if it is closed
            while rows are under way.
        timeline: receives the bytes `sent` and `received`, when a sum is waited for.
    """

    zero_copy = False

    def __init__(
        self,
        parameters: Sequence[Tensor],
        communicator: Communicator,
        timeline: Timeline | None = None,
    ) -> None:
        self._tables = [Table.of(parameter) for parameter in parameters]
        self._communicator = communicator
        self._timeline = timeline or Timeline()
        self.traffic = [(0, 0)] * len(parameters)  # known, and counted, when rows have arrived
        self._formats = [RowMessages(table) for table in self._tables]
        self._capacities = [0] * len(parameters)  # rows of the first message; the row thread's
        self._streams = SideStream([parameter.device for parameter in parameters])
        self._ready: dict[int, _Transfer] = {}  # to be issued in their turn
        self._issued = 0
        self._transfers: dict[int, _Transfer] = {}  # to be waited for
        self._versions = [0] * len(parameters)
        self._queue: queue.SimpleQueue[_Transfer | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="rows", daemon=True)
        self._thread.start()

    def begin(self, scale: float, indices: Sequence[int] | None = None) -> None:
        """Begin the order anew."""
        self._ready.clear()
        self._issued = 0

    def send(
        self, index: int, values: Sequence[Tensor | None], weight: float, operation: str
    ) -> int:
        """Copy the gradient's rows; issue them, if it is their turn, and those that waited."""
        (gradient,) = values
        rows = rows_of(gradient, weight, self._tables[index])
        self._ready[index] = self._transfers[index] = _Transfer(
            table=index, rows=rows, operation=operation, event=self._streams.record()
        )
        while self._issued in self._ready:
            self._queue.put(self._ready.pop(self._issued))
            self._issued += 1
        self._versions[index] += 1
        return self._versions[index]

    def first_to_wait_for(self, index: int) -> int:
        """Return the table itself."""
        return index

    def wait(self, index: int, version: int) -> list[Tensor | None]:
        """Return the sum of all ranks' rows: sparse, or dense where a rank's gradient is."""
        assert version == self._versions[index]
        total, sent = self._transfers.pop(index).sum.result()  # the thread's waits have limits
        self._streams.join()
        _hand_over(total)
        self._timeline.count("sent", sent)
        self._timeline.count("received", sent)
        return [total]

    def abandon(self, index: int, version: int | None) -> None:
        """Wait for the sum, if it is still to be waited for."""
        if version is not None:
            self.wait(index, version)

    def drain(self) -> None:
        """Return at once: a sum that is here needs nothing more of this rank."""

    def close(self) -> None:
        """End the thread, and the connections if rows are under way."""
        if any(not transfer.sum.done() for transfer in self._transfers.values()):
            self._communicator.abort()
        self._queue.put(None)
        self._thread.join(_CLOSE_S)
        self._ready.clear()
        self._transfers.clear()

    def _work(self) -> None:
        failure: BaseException | None = None
        while (transfer := self._queue.get()) is not None:
            try:
                if failure is not None:
                    raise failure
                with self._streams.entered():
                    self._streams.wait_for(transfer.event)
                    transfer.sum.set_result(self._exchange(transfer))
            except BaseException as error:
                failure = error
                transfer.sum.set_exception(error)
            del transfer  # its memory, until the next one comes

    @torch.no_grad()
    def _exchange(self, transfer: _Transfer) -> tuple[Tensor | None, int]:
        """Gather all ranks' rows; return their sum, and the number of bytes sent."""
        index = transfer.table
        messages = self._formats[transfer.table]
        first = self._capacities[index]
        received = [self._all_gather(messages.pack(transfer.rows, 0, first), transfer.operation)]
        headers = messages.headers(received[0])
        most = max(count for _, count in headers)
        if most > first:
            rest = messages.pack(transfer.rows, first, most - first)
            received.append(self._all_gather(rest, transfer.operation))
        self._capacities[index] = most + most // _RESERVE
        self._communicator.end_startup()  # all ranks have sent their first rows
        parts = []
        for rank, (kind, count) in enumerate(headers):
            own = [message[rank] for message in received]
            counts = [min(count, first), max(count - first, 0)][: len(own)]
            parts.append(messages.unpack(own, kind, counts))
        sent = (len(parts) - 1) * sum(message[0].nbytes for message in received)
        return sum_rows(parts, self._tables[index]), sent

    def _all_gather(self, message: Tensor, operation: str) -> list[Tensor]:
        into = [torch.empty_like(message) for _ in range(self._communicator.world_size)]
        self._communicator.all_gather(message, into).wait(f"all_gather of {operation}")
        return into


def _hand_over(total: Tensor | None) -> None:
    """Let a GPU's memory that the side stream allocated be reused after the caller's stream."""
    if total is not None and total.is_cuda:
        stream = torch.cuda.current_stream(total.device)
        for own in (total._indices(), total._values()) if total.is_sparse else (total,):
            own.record_stream(stream)
