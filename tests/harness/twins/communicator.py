"""In-process twin of a communicator: ranks are threads; sums are in rank order.

group = ThreadGroup(world_size=3)
communicators = [group.communicator(rank) for rank in range(3)]     # one a thread
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial, reduce

import torch
from torch import Tensor

from paceline.comm.communicator import Ticket
from paceline.errors import CommTimeout, PeerLost

_ResultOf = Callable[[Sequence[Tensor]], Tensor]
_in_rank_order: _ResultOf = partial(reduce, torch.add)


@cache
def make_operators() -> None:
    """Make Python's objects of torch's operators, before threads use any.

    Torch makes an operator's object at its first use, and keeps a pointer to it for the process's
    life. Where two threads use it at once for the first time, both make one, and the pointer may be
    that of the object that isn't kept: the next use in a `TorchDispatchMode` is then a SIGSEGV.
    """
    for full_name in torch._C._dispatch_get_all_op_names():
        space, _, rest = full_name.partition("::")
        if space == "aten":
            name, _, overload = rest.partition(".")
            getattr(getattr(torch.ops.aten, name), overload or "default")


@dataclass(eq=False)
class _Collective:
    """State of one in-process collective: all inputs, and how many ranks have taken the result."""

    tensors: dict[int, Tensor] = field(default_factory=dict)
    taken: int = 0


class ThreadGroup:
    """Shared state of the `ThreadCommunicator`s of one process."""

    def __init__(self, world_size: int, timeout: float = 30.0) -> None:
        make_operators()
        self.world_size = world_size
        self._timeout = timeout
        self._changed = threading.Condition()
        self._collectives: dict[int, _Collective] = defaultdict(_Collective)
        self._closed = False

    def communicator(self, rank: int) -> ThreadCommunicator:
        """Return the communicator of one rank."""
        return ThreadCommunicator(self, rank)

    def bring(self, number: int, rank: int, tensor: Tensor) -> None:
        """Add a copy of a rank's tensor to a collective."""
        with self._changed:
            tensors = self._collectives[number].tensors
            tensors[rank] = tensor.detach().clone()
            if len(tensors) == self.world_size:
                self._changed.notify_all()

    def fetch(self, number: int, rank: int, operation: str) -> list[Tensor]:
        """Wait for all ranks' tensors, in rank order.

        Raises:
            PeerLost: the group was closed.
            CommTimeout: a rank did not start the collective in time.
        """
        with self._changed:
            collective = self._collectives[number]
            there = self._changed.wait_for(
                lambda: self._closed or len(collective.tensors) == self.world_size, self._timeout
            )
            if self._closed:
                raise PeerLost(operation=operation, rank=rank, cause="the group was closed")
            if not there:
                missing = sorted(set(range(self.world_size)) - set(collective.tensors))
                raise CommTimeout(
                    f"rank {rank} timed out after {self._timeout:g} s waiting for ranks "
                    f"{missing} in {operation}."
                )
            collective.taken += 1
            if collective.taken == self.world_size:
                del self._collectives[number]
            return [collective.tensors[rank] for rank in range(self.world_size)]

    def complete(self, number: int) -> bool:
        """Return whether all ranks have brought a collective's tensors."""
        with self._changed:
            return len(self._collectives[number].tensors) == self.world_size

    def abort(self) -> None:
        """End all waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class ThreadCommunicator:
    """Communicator between threads of one process."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.rank, self.world_size = rank, group.world_size
        self._group, self.abort, self.interrupt = group, group.abort, group.abort
        self._next = 0

    def all_reduce(self, tensor: Tensor) -> Ticket:
        """Start a sum over all ranks, in rank order."""
        return self._start(tensor, _in_rank_order)

    def broadcast(self, tensor: Tensor) -> Ticket:
        """Start a broadcast from rank 0."""
        return self._start(tensor, lambda tensors: tensors[0])

    def reduce(self, tensor: Tensor) -> Ticket:
        """Start a sum over all ranks, in rank order, for rank 0."""
        return self._start(tensor, _spoilt if self.rank else _in_rank_order)

    def gather(self, tensor: Tensor, into: Sequence[Tensor]) -> Ticket:
        """Start to copy all ranks' tensors to rank 0."""
        return self._bring(
            tensor, lambda tensors: [to.copy_(own) for to, own in zip(into, tensors, strict=False)]
        )

    all_gather = gather

    def end_startup(self) -> None:
        """Change nothing: there is one limit."""

    def close(self) -> None:
        """Change nothing: other ranks may still compute."""

    def _start(self, tensor: Tensor, result_of: _ResultOf) -> Ticket:
        ticket = self._bring(tensor, lambda tensors: tensor.detach().copy_(result_of(tensors)))
        if tensor.is_floating_point():
            tensor.detach().fill_(float("nan"))  # finds reads and writes before `wait`
        return ticket

    def _bring(self, tensor: Tensor, finish: Callable[[Sequence[Tensor]], object]) -> Ticket:
        number, self._next = self._next, self._next + 1
        self._group.bring(number, self.rank, tensor)
        return _ThreadTicket(self._group, number, self.rank, finish)


@dataclass(frozen=True)
class _ThreadTicket:
    """Handle of an in-process collective; `finish` combines the tensors of all ranks."""

    group: ThreadGroup
    number: int
    rank: int
    finish: Callable[[Sequence[Tensor]], object]

    def done(self) -> bool:
        return self.group.complete(self.number)

    def wait(self, operation: str) -> None:
        self.finish(self.group.fetch(self.number, self.rank, operation))


def _spoilt(tensors: Sequence[Tensor]) -> Tensor:
    """Return values that cannot pass for a sum."""
    return torch.full_like(tensors[0], float("nan") if tensors[0].is_floating_point() else -1)
