"""A generation of the world, its members, and the groups of ranks in it that communicate.

Ranks are counted machine by machine. Machines may have different numbers of workers:

    machine          0       1           2             workers_per_machine = (2, 1, 3)
    local rank     0   1     0       0   1   2
    rank           0   1     2       3   4   5         the index in `members`

A generation has a number and a token. The number counts the run's generations over all its starts,
and is recorded in events and checkpoints. The token is a fresh secret in each generation:
keys, connections and snapshots depend on it, so messages of an earlier generation match nothing.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, Self

from paceline.cluster.json_record import JsonRecord

_START_DIGITS = 12  # of a start's id in its members' ids; the starts of one run are few


@dataclass(frozen=True, kw_only=True)
class Member:
    """Member: one process of the world.

    Attributes:
        id: unique over the run, and part of a file's name; a restarted process is another member.
        role: "worker": computes gradients; "server": owns parameters.
        machine: the number of the process's machine (Caffe2's shard_id).
        local_rank: the process's rank among those of its machine.
        address: the numeric address at which other machines reach the process's machine.
        host: the machine's host name, for messages.
    """

    id: str
    role: Literal["worker", "server"]
    machine: int
    local_rank: int
    address: str
    host: str


@dataclass(frozen=True, kw_only=True)
class Ancestor:
    """Generation from which a later one descends.

    Attributes:
        id: the generation's id.
        start: the number of completed steps from which it went on.
    """

    id: str
    start: int


@dataclass(frozen=True, kw_only=True)
class Generation(JsonRecord):
    """Generation: one membership of the world, the same value on all ranks.

    Attributes:
        number: how many generations of the run came before, in all its starts; 0 until the ranks of
            a start's first generation know it.
        token: a secret, another one in each generation, with which its members authenticate each
            other.
        members: the members, in rank order.
        ancestors: all generations from which this one descends, the oldest first.
        start: the number of completed steps from which it continues.
        start_token: the token in the name of the snapshot in memory that it continues from; ""
            where it continues from the durable state of that number of steps.
        witness: the nonce of the witness, which is one more acceptor of the vote on the next
            generation; "" without one.
        first_start: the `start` of the first generation of this start of the run; None in that one.
        stages: the number of stages into which a replica of the model is divided.
        tensor: the number of members among which each stage is divided.
    """

    number: int
    token: str = field(repr=False)
    members: tuple[Member, ...]
    ancestors: tuple[Ancestor, ...] = ()
    start: int = 0
    start_token: str = ""
    witness: str = ""
    first_start: int | None = None
    stages: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        places = [(member.machine, member.local_rank) for member in self.members]
        assert places
        assert places == sorted(set(places))

    @classmethod
    def of_workers(
        cls,
        workers_per_machine: Sequence[int],
        *,
        start_id: str,
        token: str,
        addresses: Sequence[str],
        hosts: Sequence[str],
    ) -> Self:
        """Return the first generation of a start whose members are workers.

        Args:
            workers_per_machine: for each machine, its number of workers.
            start_id: distinguishes the start from all others of the run.
            token: the job token, from which each join derives its own; or the generation's.
            addresses: for each machine, the address at which the others reach it.
            hosts: for each machine, its host name.
        """
        machines = [m for m, count in enumerate(workers_per_machine) for _ in range(count)]
        members = tuple(
            Member(
                id=f"{start_id[:_START_DIGITS]}-{rank}",
                role="worker",
                machine=machine,
                local_rank=rank - machines.index(machine),
                address=addresses[machine],
                host=hosts[machine],
            )
            for rank, machine in enumerate(machines)
        )
        return cls(number=0, token=token, members=members)

    def with_token_of_join(self, join: int) -> Self:
        """Return this generation with the token of its members' `join`-th join, counted from 0.

        All members derive the same token from the job token, without communication.
        """
        # All members count their joins alike, so the token needs
        # no exchange; it can't be derived from another join's.
        digest = hmac.digest(self.token.encode(), f"paceline join {join}".encode(), "sha256")
        return replace(self, token=digest.hex())

    @property
    def world_size(self) -> int:
        """The number of members."""
        return len(self.members)

    def replica_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that have a replica of the model together; a rank alone has a whole one.

        Ranks are in the order stage, replica, tensor, of which the last changes first.
        """
        replicas = self.world_size // (self.stages * self.tensor)
        index = rank // self.tensor % replicas
        first = [(stage * replicas + index) * self.tensor for stage in range(self.stages)]
        return tuple(start + at for start in first for at in range(self.tensor))

    def holders_of_part(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that have the same part of the model as a rank, itself included."""
        replicas = self.world_size // (self.stages * self.tensor)
        stage = rank // (replicas * self.tensor)
        first = stage * replicas * self.tensor + rank % self.tensor
        return tuple(first + self.tensor * index for index in range(replicas))

    def in_whole_replicas(self, members: Collection[Member]) -> list[Member]:
        """Return those of some members whose replica of the model has all its members."""
        if self.stages * self.tensor == 1:
            return list(members)
        ids = {member.id for member in members}
        return [
            member
            for rank, member in enumerate(self.members)
            if all(self.members[mate].id in ids for mate in self.replica_of(rank))
        ]

    @property
    def workers_per_machine(self) -> tuple[int, ...]:
        """For each machine, in order of the machines' numbers, its number of workers."""
        return tuple(Counter(member.machine for member in self.members).values())

    @property
    def leader(self) -> Member:
        """The member of rank 0."""
        return self.members[0]

    @property
    def contributors(self) -> tuple[int, ...]:
        """The ranks that contribute gradients."""
        return tuple(range(self.world_size))

    @property
    def owners(self) -> tuple[int, ...]:
        """The ranks that own shards."""
        return tuple(range(self.world_size))

    @cached_property
    def id(self) -> str:
        """Name of the generation, unlike those of all others; it doesn't reveal the token."""
        # The id is on the disk and in the ledger, where a token must not be.
        text = f"paceline generation {self.token}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def key_prefix(self) -> str:
        """Prefix of this generation's keys in the store, and of its snapshots' names."""
        return f"generation/{self.id}"

    @cached_property
    def machines(self) -> tuple[int, ...]:
        """The numbers of its machines, in order."""
        return tuple(sorted({member.machine for member in self.members}))

    @cached_property
    def lineage(self) -> tuple[Ancestor, ...]:
        """Its ancestors and itself: the ancestors of a generation that follows it."""
        return (*self.ancestors, Ancestor(id=self.id, start=self.start))

    def descends_from(self, id: str) -> bool:
        """Return whether a generation, given by its id, is an ancestor of this one."""
        return any(ancestor.id == id for ancestor in reversed(self.ancestors))

    def rank_of(self, machine: int, local_rank: int) -> int:
        """Return the rank of a machine's process."""
        places = [(member.machine, member.local_rank) for member in self.members]
        return places.index((machine, local_rank))

    def machine_of(self, rank: int) -> int:
        """Return the number of the machine that a rank runs on."""
        assert rank >= 0
        return self.members[rank].machine

    def describe(self, rank: int) -> str:
        """Name a rank for messages: "rank 3 on machine 1 (host)".

        In a start's later generations, whose ranks are dealt anew, the generation is named, too:
        "rank 2 of generation 5 on machine 1 (host)".
        """
        later = "" if self.first_start is None else f" of generation {self.number}"
        return f"rank {rank}{later} on machine {self.machine_of(rank)} ({self.members[rank].host})"

    def name_of(self, member: str) -> str | None:
        """Name a member for messages, by its id, as `describe` does; None: it isn't in here."""
        ids = [each.id for each in self.members]
        return self.describe(ids.index(member)) if member in ids else None


@dataclass(frozen=True, kw_only=True)
class Group:
    """Group: ranks of one generation that communicate, as one of them sees it.

    Attributes:
        ranks: the members' ranks in the generation, in order.
        rank: this process's rank in the group, 0 to size - 1.
    """

    generation: Generation
    ranks: tuple[int, ...]
    rank: int

    @classmethod
    def world(cls, generation: Generation, rank: int) -> Self:
        """Return the group of all ranks, as one of them sees it."""
        return cls(generation=generation, ranks=tuple(range(generation.world_size)), rank=rank)

    def on_machine(self) -> Self:
        """Return the group of the workers of this process's machine."""
        members = enumerate(self.generation.members)
        ranks = tuple(rank for rank, member in members if member.machine == self.machine)
        return type(self)(generation=self.generation, ranks=ranks, rank=self.local_rank)

    @property
    def size(self) -> int:
        """The number of ranks in the group: of the group of all ranks, the world size."""
        return len(self.ranks)

    @property
    def machine(self) -> int:
        """The number of this process's machine."""
        return self.member.machine

    @property
    def local_rank(self) -> int:
        """This process's local rank."""
        return self.member.local_rank

    @property
    def local_world_size(self) -> int:
        """The number of workers on this process's machine."""
        return sum(member.machine == self.machine for member in self.generation.members)

    @property
    def address(self) -> str:
        """The address of this process's machine: what its Gloo and NCCL listen on."""
        return self.member.address

    @property
    def member(self) -> Member:
        """This process's member."""
        return self.generation.members[self.ranks[self.rank]]


def joins_key(machine: int, local_rank: int) -> str:
    """Return the key in a start's store that counts how often a worker has joined."""
    return f"joins/{machine}/{local_rank}"
