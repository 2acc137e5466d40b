"""Exchange by all-reduce: NCCL's or Gloo's, a bucket at a time, in one order on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm.communicator import Communicator, Ticket
from paceline.reduce.buckets import Bucket, allocate


class Collectives:
    """Exchange by in-place all-reduce.

    Args:
        buckets: the buckets to exchange.
        communicator: connects all ranks.
        statistics: a tensor of the running statistics' shape, (numel,); None if there are none.
    """

    zero_copy = False

    def __init__(
        self,
        buckets: Sequence[Bucket],
        communicator: Communicator,
        statistics: Tensor | None,
    ) -> None:
        self._communicator = communicator
        self._memory = [allocate(bucket.parameters) for bucket in buckets]
        self._flat = [memory.flat for memory in self._memory]
        if statistics is not None:
            self._flat.append(statistics.clone())
        indices = range(len(self._flat))
        self._order = [*indices[len(buckets) :], *indices[: len(buckets)]]
        carried = 2 * (communicator.world_size - 1)  # by a ring, a part of 1 / world size each
        bytes_carried = [carried * flat.nbytes // communicator.world_size for flat in self._flat]
        self.traffic = [(carried, carried) for carried in bytes_carried]
        # By bucket, whether any rank uses each parameter; None: this rank doesn't know.
        self._used: dict[int, Sequence[bool] | None] = {}
        self._ready: set[int] = set()  # complete, and to be issued in their turn
        self._issued = 0
        self._operations: dict[int, str] = {}
        self._tickets: dict[int, Ticket] = {}  # in the order of their issue
        self._versions = [0] * len(self._flat)

    def begin(self, scale: float, indices: Sequence[int] | None = None) -> None:
        """Begin the order anew."""
        self._ready.clear()
        self._issued = 0

    def send(
        self, index: int, values: Sequence[Tensor | None], weight: float, operation: str
    ) -> int:
        """Pack the bucket, issue it if it is its turn, and those that waited for it."""
        self._operations[index] = operation
        if index < len(self._memory):
            self._memory[index].pack(values, weight)
            own = [weight > 0 and value is not None for value in values]
            self._used[index] = own if all(own) or self._communicator.world_size == 1 else None
        else:
            (statistics,) = values
            assert statistics is not None
            if weight:
                torch.mul(statistics, weight, out=self._flat[index])
            else:
                self._flat[index].zero_()  # whatever they are
        self._ready.add(index)
        while self._issued < len(self._order) and self._order[self._issued] in self._ready:
            turn = self._order[self._issued]
            self._tickets[turn] = self._communicator.all_reduce(self._flat[turn])
            self._issued += 1
        self._versions[index] += 1
        return self._versions[index]

    def first_to_wait_for(self, index: int) -> int:
        """Return the bucket that was issued first, unless `index` is there already.

        They arrive in the order of their issue, so a bucket's arithmetic hides under the exchange
        of those that were sent after it.
        """
        if self._tickets[index].done():
            return index
        return next(sent for sent in self._tickets if sent < len(self._memory))

    def wait(self, index: int, version: int) -> list[Tensor | None]:
        """Wait for the bucket's all-reduce."""
        assert version == self._versions[index]
        self._tickets.pop(index).wait(f"all_reduce of {self._operations[index]}")
        if index == len(self._memory):
            return [self._flat[index]]
        return self._memory[index].reduced(self._used[index])

    def abandon(self, index: int, version: int | None) -> None:
        """Wait for the bucket's all-reduce, if it is still to be waited for."""
        if version is not None:
            self.wait(index, version)

    def drain(self) -> None:
        """Return at once: an all-reduce that ended here needs nothing more of this rank."""

    def close(self) -> None:
        """Let go of what is under way."""
        self._tickets.clear()
