"""The in-process twin of a communicator: ranks are threads, sums are added in rank order.

group = ThreadGroup(world_size=3)
communicators = [group.communicator(rank) for rank in range(3)]     # one a thread
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.comm.communicator import Ticket
from paceline.errors import CommTimeout, PeerLost

_ResultOf = Callable[[Sequence[Tensor]], Tensor]


@dataclass(eq=False)
class _Collective:
    """One collective: what each rank brought, and its result."""

    tensors: dict[int, Tensor] = field(default_factory=dict)
    taken: int = 0


class ThreadGroup:
    """What the ranks of one process share."""

    def __init__(self, world_size: int, timeout: float = 30.0) -> None:
        self.world_size = world_size
        self._timeout = timeout
        self._changed = threading.Condition()
        self._collectives: dict[int, _Collective] = defaultdict(_Collective)
        self._closed = False

    def communicator(self, rank: int) -> ThreadCommunicator:
        """Return the communicator of one rank."""
        return ThreadCommunicator(self, rank)

    def bring(self, number: int, rank: int, tensor: Tensor) -> None:
        """Add a rank's copy of its tensor to a collective."""
        with self._changed:
            self._collectives[number].tensors[rank] = tensor.detach().clone()
            self._changed.notify_all()

    def fetch(self, number: int, operation: str) -> list[Tensor]:
        """Wait for all ranks' tensors, in rank order.

        Raises:
            PeerLost: the group was closed; CommTimeout: a rank didn't come.
        """
        with self._changed:
            collective = self._collectives[number]
            there = self._changed.wait_for(
                lambda: self._closed or len(collective.tensors) == self.world_size, self._timeout
            )
            if self._closed:
                raise PeerLost(f"the group was closed in {operation}")
            if not there:
                missing = sorted(set(range(self.world_size)) - set(collective.tensors))
                raise CommTimeout(f"ranks {missing} were silent for {self._timeout} s: {operation}")
            collective.taken += 1
            if collective.taken == self.world_size:
                del self._collectives[number]
            return [collective.tensors[rank] for rank in range(self.world_size)]

    def complete(self, number: int) -> bool:
        """Tell whether all ranks have brought a collective's tensors."""
        with self._changed:
            return len(self._collectives[number].tensors) == self.world_size

    def close(self) -> None:
        """End all waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class ThreadCommunicator:
    """One thread's end of a `ThreadGroup`."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.rank, self.world_size = rank, group.world_size
        self._group = group
        self._next = 0

    def all_reduce(self, tensor: Tensor) -> Ticket:
        """Start a sum over all ranks, in rank order."""
        return self._start(tensor, _total)

    def broadcast(self, tensor: Tensor) -> Ticket:
        """Start a broadcast from rank 0."""
        return self._start(tensor, _first)

    def reduce(self, tensor: Tensor) -> Ticket:
        """Start a sum over all ranks, in rank order, for rank 0."""
        return self._start(tensor, _spoilt if self.rank else _total)

    def gather(self, tensor: Tensor, into: Sequence[Tensor]) -> Ticket:
        """Start to copy all ranks' tensors to rank 0."""
        return _Gathering(self._bring(tensor), into)

    def steady(self) -> None:
        """Change nothing: there is one limit."""

    def end(self) -> None:
        """Do nothing: the others may still be at work."""

    def close(self) -> None:
        """End all waits of the group."""
        self._group.close()

    def _start(self, tensor: Tensor, result_of: _ResultOf) -> Ticket:
        collective = self._bring(tensor)
        if tensor.is_floating_point():
            tensor.detach().fill_(float("nan"))  # who reads or writes it before `wait` is found out
        return _ThreadTicket(collective, tensor, result_of)

    def _bring(self, tensor: Tensor) -> _Begun:
        number, self._next = self._next, self._next + 1
        self._group.bring(number, self.rank, tensor)
        return _Begun(self._group, number)


@dataclass(frozen=True)
class _Begun:
    """A collective that this rank has begun."""

    group: ThreadGroup
    number: int

    def done(self) -> bool:
        return self.group.complete(self.number)

    def tensors(self, operation: str) -> list[Tensor]:
        return self.group.fetch(self.number, operation)


@dataclass(frozen=True)
class _Gathering:
    begun: _Begun
    into: Sequence[Tensor]

    def done(self) -> bool:
        return self.begun.done()

    def wait(self, operation: str) -> None:
        for place, tensor in zip(self.into, self.begun.tensors(operation), strict=False):
            place.copy_(tensor)


@dataclass(frozen=True)
class _ThreadTicket:
    begun: _Begun
    tensor: Tensor
    result_of: _ResultOf

    def done(self) -> bool:
        return self.begun.done()

    def wait(self, operation: str) -> None:
        self.tensor.detach().copy_(self.result_of(self.begun.tensors(operation)))


def _total(tensors: Sequence[Tensor]) -> Tensor:
    result = tensors[0].clone()
    for other in tensors[1:]:
        result += other
    return result


def _first(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0]


def _spoilt(tensors: Sequence[Tensor]) -> Tensor:
    """Return what nobody takes for a sum."""
    return torch.full_like(tensors[0], float("nan") if tensors[0].is_floating_point() else -1)
