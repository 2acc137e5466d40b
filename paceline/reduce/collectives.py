"""An exchange by `all_reduce`: NCCL's or Gloo's, a bucket at a time, in one order on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm.communicator import Communicator, Ticket
from paceline.reduce.buckets import Bucket


class Collectives:
    """An exchange by all_reduce, in place.

    Args:
        buckets: what is exchanged.
        communicator: of all ranks.
        statistics: of the size of the running statistics, (numel,), if there are any.
    """

    zero_copy = False

    def __init__(
        self,
        buckets: Sequence[Bucket],
        communicator: Communicator,
        statistics: Tensor | None,
    ) -> None:
        self._communicator = communicator
        self._memory = [bucket.allocate() for bucket in buckets]
        self._flat = [memory.flat for memory in self._memory]
        if statistics is not None:
            self._flat.append(statistics.clone())
        places = range(len(self._flat))
        self._order = [*places[len(buckets) :], *places[: len(buckets)]]
        self._full: dict[int, bool] = {}  # bucket: did this rank have all values?
        self._ready: set[int] = set()  # complete, and to be issued in their turn
        self._issued = 0
        self._tickets: dict[int, Ticket] = {}  # in the order of their issue

    def steady(self) -> None:
        """Tell the communicator."""
        self._communicator.steady()

    def begin(self, *, applied: bool, scale: float) -> None:
        """Begin the order anew."""
        self._ready.clear()
        self._issued = 0

    def send(self, index: int, values: Sequence[Tensor | None], weight: float) -> None:
        """Pack the run, issue it, if it is its turn, and those that waited for it."""
        if index < len(self._memory):
            self._memory[index].pack(values, weight)
            self._full[index] = weight > 0 and all(value is not None for value in values)
        else:
            (statistics,) = values
            assert statistics is not None
            torch.mul(statistics, weight, out=self._flat[index])
        self._ready.add(index)
        while self._issued < len(self._order) and self._order[self._issued] in self._ready:
            turn = self._order[self._issued]
            self._tickets[turn] = self._communicator.all_reduce(self._flat[turn])
            self._issued += 1

    def traffic(self, index: int) -> tuple[int, int]:
        """Return what a ring carries: 2 (N - 1) / N of the run in each direction."""
        world_size = self._communicator.world_size
        carried = 2 * (world_size - 1) * self._flat[index].nbytes // world_size
        return carried, carried

    def next(self, index: int) -> int:
        """Return the bucket that was sent first, as long as `index` isn't there.

        They arrive in the order of their issue, so a bucket's arithmetic hides under the exchange
        of those that were sent after it.
        """
        if self._tickets[index].done():
            return index
        return next(place for place in self._tickets if place < len(self._memory))

    def wait(self, index: int, operation: str) -> list[Tensor | None]:
        """Wait for the run's all_reduce."""
        self._tickets.pop(index).wait(f"all_reduce of {operation}")
        if index == len(self._memory):
            return [self._flat[index]]
        return self._memory[index].reduced(used_here=self._full[index])

    def discard(self, index: int, operation: str) -> None:
        """Wait for the run's all_reduce."""
        self.wait(index, operation)

    def drain(self) -> None:
        """Go: what has been waited for here needs nothing more of this rank."""

    def close(self) -> None:
        """Forget what is under way."""
        self._tickets.clear()
