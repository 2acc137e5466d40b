"""Collectives by torch's process groups: NCCL for GPUs' memory, Gloo for the CPU's.

A group is made for one generation and isn't torch's global default, so that a next generation can
have the next group. Gloo listens on the address that reaches the peers, not on the hostname's.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from paceline.comm.communicator import Ticket
from paceline.errors import CommError, CommTimeout, PeerLost

# Words of the transports for a peer that is gone; their other complaints are about the call.
_OF_CONNECTIONS = ("connect", "peer", "socket", "pipe", "closed", "abort", "remote process")


class ProcessGroupCommunicator:
    """Ranks connected by one `torch.distributed` process group."""

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
    ) -> None:
        """Connect to all ranks; collective.

        Args:
            store: where ranks find each other's addresses; fresh in this generation.
            rank: this rank.
            world_size: the number of ranks.
            device: what the tensors will live on; chooses the transport.
            address: the IP address of this machine that the peers reach.
            first_timeout: seconds to wait for peers until `steady` is called.
            timeout: seconds to wait for peers afterwards.

        Raises:
            CommError: a rank didn't come in time.
        """
        self.rank, self.world_size = rank, world_size
        self._limit = timedelta(seconds=first_timeout)
        self._timeout = timedelta(seconds=timeout)
        try:
            make = _nccl if device.type == "cuda" else _gloo
            self._group = make(store, rank, world_size, address, self._limit)
        except RuntimeError as error:
            raise CommError(
                f"rank {rank} of {world_size} at {address} couldn't connect to all ranks "
                f"({_first_line(error)}): see what the others say, and whether a firewall is "
                "between them."
            ) from error

    def all_reduce(self, tensor: Tensor) -> Ticket:
        """Start a sum over all ranks."""
        options = dist.AllreduceOptions()
        options.timeout = self._limit
        return self._start(self._group.allreduce, [tensor], options)

    def broadcast(self, tensor: Tensor) -> Ticket:
        """Start a broadcast from rank 0."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._limit
        return self._start(self._group.broadcast, [tensor], options)

    def reduce(self, tensor: Tensor) -> Ticket:
        """Start a sum over all ranks, for rank 0."""
        options = dist.ReduceOptions()
        options.rootRank = 0
        options.timeout = self._limit
        return self._start(self._group.reduce, [tensor], options)

    def gather(self, tensor: Tensor, into: Sequence[Tensor]) -> Ticket:
        """Start to copy all ranks' tensors to rank 0."""
        options = dist.GatherOptions()
        options.rootRank = 0
        options.timeout = self._limit
        places = [list(into)] if into else []
        return self._start(partial(self._group.gather, places), [tensor], options)

    def steady(self) -> None:
        """Use the shorter time-out from now on."""
        self._limit = self._timeout

    def end(self) -> None:
        """Close, and wait for the group's threads.

        One that still lets go of a tensor while the interpreter ends would abort the process.
        """
        self._group = None

    def close(self) -> None:
        """Abort what is in flight."""
        self._group.abort()

    def _start(self, collective: Any, tensors: list[Tensor], options: Any) -> Ticket:
        try:
            return _WorkTicket(collective(tensors, options), self.rank, self._limit)
        except RuntimeError as error:
            raise _translate(error, self.rank, "starting a collective", self._limit) from error


class _WorkTicket:
    def __init__(self, work: dist.Work, rank: int, limit: timedelta) -> None:
        self._work, self._rank, self._limit = work, rank, limit

    def done(self) -> bool:
        return self._work.is_completed()

    def wait(self, operation: str) -> None:
        try:
            self._work.wait(self._limit)
        except RuntimeError as error:
            raise _translate(error, self._rank, operation, self._limit) from error


def _gloo(store: Store, rank: int, world_size: int, address: str, limit: timedelta) -> Any:
    gloo: Any = dist.ProcessGroupGloo  # its options are in no type stub
    options = gloo._Options()
    options._timeout = limit
    options._devices = [gloo.create_device(hostname=address)]
    return gloo(store, rank, world_size, options)


def _nccl(store: Store, rank: int, world_size: int, address: str, limit: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(store, rank, world_size, options)


def _translate(error: RuntimeError, rank: int, operation: str, limit: timedelta) -> CommError:
    text = _first_line(error)
    if "timed out" in text.lower() or "timeout" in text.lower():
        return CommTimeout(
            f"rank {rank} waited {limit.total_seconds():g} s for a peer in {operation}: one hangs, "
            "can't be reached, or needs a longer --timeout (--first_iter_timeout in the start)."
        )
    if any(word in text.lower() for word in _OF_CONNECTIONS):
        return PeerLost(f"rank {rank} lost a peer in {operation}: {text}")
    return CommError(f"rank {rank} failed in {operation}: {text}")


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
