"""Members: a frozen list of the world's ranks, with their machines and addresses.

Ranks are counted machine by machine: with workers (2, 3) machine 0 has ranks 0 and 1, machine 1
has 2, 3 and 4. Machines may have different numbers of workers.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import Self


@dataclass(frozen=True, kw_only=True)
class Members:
    """Members of one generation of the world, as one worker sees them.

    Attributes:
        generation: how many worlds these processes closed before in one start of the run. Keys in
            the store and the purposes of windows contain it.
        rank: this worker's rank, 0 to world_size - 1.
        world_size: the number of workers.
        local_rank: this worker's local rank.
        local_world_size: the number of workers on its machine.
        machine: the number of this worker's machine (Caffe2's shard_id).
        workers_per_machine: for each machine, its number of workers.
        addresses: for each machine, the IPv4 address at which all other machines reach it.
        hosts: the machines' host names, for messages.
    """

    generation: int
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    machine: int
    workers_per_machine: tuple[int, ...]
    addresses: tuple[str, ...]
    hosts: tuple[str, ...]

    def __post_init__(self) -> None:
        assert len(self.addresses) == len(self.hosts) == len(self.workers_per_machine)
        assert self.world_size == sum(self.workers_per_machine)
        assert self.local_world_size == self.workers_per_machine[self.machine]
        assert 0 <= self.local_rank < self.local_world_size
        assert self.rank == sum(self.workers_per_machine[: self.machine]) + self.local_rank

    @classmethod
    def on(
        cls,
        machine: int,
        local_rank: int,
        *,
        workers_per_machine: tuple[int, ...],
        addresses: tuple[str, ...],
        hosts: tuple[str, ...],
        generation: int = 0,
    ) -> Self:
        """Return the world as worker `local_rank` of `machine` sees it."""
        return cls(
            generation=generation,
            rank=sum(workers_per_machine[:machine]) + local_rank,
            world_size=sum(workers_per_machine),
            local_rank=local_rank,
            local_world_size=workers_per_machine[machine],
            machine=machine,
            workers_per_machine=workers_per_machine,
            addresses=addresses,
            hosts=hosts,
        )

    @classmethod
    def alone(cls, host: str = "localhost") -> Self:
        """Return a world of one worker."""
        return cls.on(0, 0, workers_per_machine=(1,), addresses=("127.0.0.1",), hosts=(host,))

    @property
    def address(self) -> str:
        """The address of this worker's machine: what its Gloo and NCCL listen on."""
        return self.addresses[self.machine]

    def machine_of(self, rank: int) -> int:
        """Return the number of the machine that a rank runs on."""
        assert 0 <= rank < self.world_size
        return bisect_right(list(accumulate(self.workers_per_machine)), rank)

    def describe(self, rank: int) -> str:
        """Name a rank for messages: "rank 3 on machine 1 (host)"."""
        machine = self.machine_of(rank)
        return f"rank {rank} on machine {machine} ({self.hosts[machine]})"
