"""Collectives over torch's process groups: NCCL for GPUs' memory, Gloo for the CPU's.

A group lives for one generation and is not torch's global default, so that the next generation has
a new one. Gloo listens on the address that reaches the peers, until all ranks are connected.
"""

from __future__ import annotations

import atexit
import ctypes
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, Store

from paceline.comm.communicator import Ticket
from paceline.comm.forked_children import close_in_children
from paceline.comm.gloo_loops import (
    connections_of,
    descriptors,
    report_once,
    shut_down,
    stop_listening,
)
from paceline.comm.peer_activities import NO_PEERS, PeerActivities, Timeout
from paceline.comm.window import timed_out
from paceline.errors import CommError, PeerLost

_OPENING = threading.Lock()  # guards the process's table of descriptors while one is read
_PLACE = re.compile(r"\[[^\]]*\.\w+:\d+\] ?|[^\s\[]+\.(?:cc|cpp|hpp|h|cu):\d+,? ?")
_ADDRESS = re.compile(r"\[([^\]\s]+)\]:\d+")
_LOOK_S = 1.0  # in a wait: between two looks at the connections
# A peer may close right after its part of a collective,
# whose last bytes are still on their way here.
_GRACE_S = 4.0  # in a wait: after a connection is closed
_CLOSE_S = 0.1  # the wait for a group's threads
_POLL_S = 0.001  # between two looks at them
# Words by which the transports report a lost peer; their other errors are about the call.
_OF_CONNECTIONS = ("connect", "peer", "socket", "pipe", "closed", "abort", "remote process")


class UnfinishedGroups:
    """Aborted groups of which a thread still waits, kept until it ends, at the collective's limit.

    Gloo wakes no thread of its own that waits for a send which the peer hasn't asked for. The
    destructor of such a group waits for that thread, so no group is dropped before; at the
    process's end none is dropped at all. Its event loops get one more event of each connection.
    """

    def __init__(self) -> None:
        self._groups: list[tuple[Any, list[dist.Work]]] = []
        self._lock = threading.Lock()  # guards `_groups`
        atexit.register(self._keep_forever)

    def __len__(self) -> int:
        """Count the groups that are kept."""
        self._drop_finished()
        return len(self._groups)

    def add(self, group: Any, works: Sequence[dist.Work], loops: Sequence[int] = ()) -> None:
        """Drop a group once its collectives have ended: within `_CLOSE_S`, or by a later call.

        Args:
            group: the group, whose connections are shut down.
            works: its collectives.
            loops: the descriptors of its event loops.
        """
        self._drop_finished()
        deadline = time.monotonic() + _CLOSE_S
        while unfinished := [work for work in works if not work.is_completed()]:
            if time.monotonic() > deadline:
                report_once(loops)
                with self._lock:
                    self._groups.append((group, unfinished))
                return
            time.sleep(_POLL_S)

    def _drop_finished(self) -> None:
        with self._lock:
            self._groups = [
                (group, works)
                for group, works in self._groups
                if not all(work.is_completed() for work in works)
            ]

    def _keep_forever(self) -> None:
        for group, _ in self._groups:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


UNFINISHED = UnfinishedGroups()


class ProcessGroupCommunicator:
    """Communicator over a `torch.distributed` process group."""

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        address: str,
        first_timeout: float,
        timeout: float,
        activities: PeerActivities = NO_PEERS,
    ) -> None:
        """Connect to all ranks; collective.

        Args:
            store: where ranks publish their addresses; fresh in this generation.
            rank: this rank.
            world_size: the number of ranks.
            device: where the tensors live; selects the transport.
            address: the IP address of this machine that the peers reach.
            first_timeout: the limit of a wait in seconds until `end_startup` is called.
            timeout: the limit afterwards.
            activities: what the peers do; they may extend the limit.

        Raises:
            CommError: a rank did not connect in time.
        """
        self.rank = rank
        self.world_size = world_size
        self.timeout = Timeout(first_timeout, timeout, activities)
        self._longest = activities.longest
        limit = timedelta(seconds=first_timeout)
        self._loops: list[int] = []  # descriptors of Gloo's event loops
        self._works: deque[dist.Work] = deque()  # collectives that may not have ended
        self._ending = threading.Lock()  # guards the end of the group against `interrupt`
        try:
            if device.type == "cuda":
                self._group = _nccl(store, rank, world_size, limit)
            else:
                self._group, self._loops = _gloo(store, rank, world_size, address, limit)
        except RuntimeError as error:
            raise CommError(
                f"rank {rank} of {world_size} at {address} could not connect to all ranks "
                f"({_cause(error)}): check the output of the other ranks, and firewalls."
            ) from error
        # NCCL connects now, and not while something runs on the GPU. Of Gloo's ranks, one that
        # closes at once would fail those that are still connecting.
        self._connected = len(self._connections())  # a wait looks at it
        self.all_reduce(torch.ones(1, device=device)).wait("the first sum of all ranks")
        # Gloo doesn't end each wait whose peer has closed: a connection that is missing ends it.
        self._connected = len(self._connections())
        close_in_children(self, _close_inherited)

    def all_reduce(self, tensor: Tensor) -> Ticket:
        """Start a sum over all ranks."""
        return self._start("allreduce", [tensor], options=dist.AllreduceOptions())

    def broadcast(self, tensor: Tensor) -> Ticket:
        """Start a broadcast from rank 0."""
        return self._start("broadcast", [tensor], options=dist.BroadcastOptions())

    def reduce(self, tensor: Tensor) -> Ticket:
        """Start a sum over all ranks, for rank 0."""
        return self._start("reduce", [tensor], options=dist.ReduceOptions())

    def gather(self, tensor: Tensor, into: Sequence[Tensor]) -> Ticket:
        """Start to copy all ranks' tensors to rank 0."""
        targets = [list(into)] if into else []
        return self._start("gather", targets, [tensor], options=dist.GatherOptions())

    def all_gather(self, tensor: Tensor, into: Sequence[Tensor]) -> Ticket:
        """Start to copy all ranks' tensors to all ranks."""
        return self._start("allgather", [list(into)], [tensor], options=AllgatherOptions())

    def end_startup(self) -> None:
        """Use the shorter timeout from now on."""
        self.timeout.end_startup()

    def close(self) -> None:
        """Close, and wait for the group's threads.

        A thread that releases a tensor while the interpreter ends would abort the process.
        """
        self._works.clear()
        with self._ending:
            self._group = None
            self._loops = []

    def interrupt(self) -> None:
        """Shut the connections down, from any thread; NCCL's group is aborted."""
        with self._ending:
            if self._group is not None and not self._loops:
                self._group.abort()
            shut_down(self._loops)

    def abort(self) -> None:
        """Abort the collectives in flight, also where a peer is frozen; a thread's wait ends.

        A group of which a thread waits on is kept until that ends (`UnfinishedGroups`).
        """
        if self._group is None:
            return
        # In this order, because torch's abort may return while a wait continues, and write into its
        # buffer when the peer wakes.
        shut_down(self._loops)  # `abort` ends no wait for a peer that is frozen
        self._group.abort()
        group = self._group
        works = list(self._works)
        loops = self._loops
        self.close()
        UNFINISHED.add(group, works, loops)

    def is_connected(self) -> bool:
        """Return whether all connections are open that there were at the start."""
        return len(self._connections()) >= self._connected

    def _connections(self) -> list[int]:
        """Return the descriptors of Gloo's connections."""
        return [number for loop in self._loops for number, _ in connections_of(loop)]

    def _start(self, name: str, *tensors: Sequence[Any], options: Any) -> Ticket:
        """Start a collective of the group; the options' own root is rank 0."""
        if self._group is None:
            cause = "this process closed the connections"
            raise PeerLost(rank=self.rank, operation="starting a collective", cause=cause)
        # The transport's own limit comes after the wait's, however long peers extend that.
        limit = timedelta(seconds=self.timeout.seconds)
        options.timeout = limit + timedelta(seconds=self._longest)
        # A finished collective would keep its tensors alive.
        while self._works and self._works[0].is_completed():
            self._works.popleft()
        try:
            work = getattr(self._group, name)(*tensors, options)
        except RuntimeError as error:
            raise _translate(error, self.rank, "starting a collective", limit) from error
        self._works.append(work)
        if not self._loops:
            return _Ticket(work, self.rank, limit)
        return _WatchingTicket(self, work)


class _Ticket:
    """Handle of a collective whose wait is the work's own, as on GPUs.

    There it is the present stream's, and the host continues; a wait with a limit would be the
    host's. A peer that is lost or hangs is found by the waits for step summaries, which are not on
    GPUs, by the membership, which interrupts the group, or by NCCL's own watchdog.
    """

    def __init__(self, work: dist.Work, rank: int, limit: timedelta) -> None:
        self._work = work
        self._rank = rank
        self._limit = limit

    def done(self) -> bool:
        return self._work.is_completed()

    def wait(self, operation: str) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _translate(error, self._rank, operation, self._limit) from error


class _WatchingTicket(_Ticket):
    """Handle of an asynchronous collective of a process group.

    Gloo doesn't always end a collective whose peer has closed its connection: a send that the peer
    hadn't asked for waits on. So a wait looks at the connections now and then.
    """

    def __init__(self, communicator: ProcessGroupCommunicator, work: dist.Work) -> None:
        limit = timedelta(seconds=communicator.timeout.seconds)
        super().__init__(work, communicator.rank, limit)
        self._communicator = communicator

    def wait(self, operation: str) -> None:
        lost_at = math.inf
        seconds = self._limit.total_seconds()  # of when it began, perhaps in the first step
        with self._communicator.timeout.limit(operation, seconds) as limit:
            while True:
                try:
                    self._work.wait(timedelta(seconds=max(limit.slice(_LOOK_S), _POLL_S)))
                except RuntimeError as error:
                    # A slice of the wait timed out just as the collective ended: that is no error.
                    if self._work.is_completed():
                        return super().wait(operation)  # perhaps of an error
                    if limit.look():
                        raise _translate(error, self._rank, operation, self._limit) from error
                else:
                    return
                now = time.monotonic()
                if not self._communicator.is_connected():
                    lost_at = min(lost_at, now)
                if now > lost_at + _GRACE_S:  # a peer may close after its part of the collective
                    cause = "a peer closed the connection"
                    raise PeerLost(rank=self._rank, operation=operation, cause=cause)


def _gloo(
    store: Store, rank: int, world_size: int, address: str, limit: timedelta
) -> tuple[Any, list[int]]:
    """Connect all ranks by Gloo; return the group, and the descriptors of its event loops."""
    gloo: Any = dist.ProcessGroupGloo  # its options are in no type stub
    options = gloo._Options()
    options._timeout = limit
    with _OPENING:  # or another thread's device would be found among the new descriptors
        before = descriptors()
        device = gloo.create_device(hostname=address, lazy_init=False)
        opened = dict(descriptors().items() - before.items())
    options._devices = [device]
    group = gloo(store, rank, world_size, options)
    return group, stop_listening(opened, address)


def _close_inherited(communicator: ProcessGroupCommunicator) -> None:
    """Close this forked process's copies of a communicator's connections."""
    for number in communicator._connections():
        os.close(number)


def _nccl(store: Store, rank: int, world_size: int, limit: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(store, rank, world_size, options)


def _translate(error: RuntimeError, rank: int, operation: str, limit: timedelta) -> CommError:
    """Return the error of a collective in this package's terms."""
    cause = _cause(error)
    text = cause.lower()
    if "timed out" in text or "timeout" in text:
        what = "a peer hangs, can't be reached"
        return timed_out(rank, limit.total_seconds(), "a peer", operation, what)
    if any(word in text for word in _OF_CONNECTIONS):
        return PeerLost(rank=rank, operation=operation, cause=cause)
    return CommError(f"rank {rank} failed in {operation}: {cause}.")


def _cause(error: BaseException) -> str:
    """Return what a transport says in its first line, without places in its source code."""
    text = _PLACE.sub("", str(error).strip().partition("\n")[0]).partition(". ")[0]
    address = _ADDRESS.search(text)
    if address and any(word in text.lower() for word in ("reset by peer", "closed by peer")):
        return f"the process at {address[1]} ended, or closed the connection"
    return text.rstrip(". ")
