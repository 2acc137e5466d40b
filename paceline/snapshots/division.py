"""Divided snapshots: where replicas are equal, each rank copies a part of the state, and another's.

    rank             0        1        2        3
    its own part     0        1        2        3          1/4 of the values each
    as the holder    3        0        1        2          of another rank's (`holder_of`)

Nothing is sent: the second holder copies its own replica's values. So two snapshots take 4/N of the
state instead of twice the state, and any one rank, or any one machine of several, may be lost. In
the next generation each part is broadcast by a rank that has it (`fetch_divided`).

Values are divided by the parameter: contiguous parts of about equal bytes. What isn't a parameter,
nor the optimizer's state of one, is small and is copied by all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.cluster.membership.backup_holder import holder_of
from paceline.cluster.membership.generation import Generation
from paceline.cluster.membership.snapshot_name import SnapshotName
from paceline.cluster.supervision.allocator import machine_memory
from paceline.comm.communicator import Communicator, gather_bytes, total
from paceline.config.run import SnapshotCopies
from paceline.errors import CommError, Message
from paceline.replica.state_parts import DIVISION, OPTIMIZER, PARAMETERS, part_suffix
from paceline.snapshots.store import SnapshotStore
from paceline.state.state_bytes import pack_state, unpack_state

_FEWEST = 3  # ranks; of two, each would have its own part and the other's: all
_WHOLE_COPIES = 4  # times the weights: two snapshots, with SGD's momentum
_MOST = 1 / 4  # of a machine's memory, for whole copies
_DIVIDED = (PARAMETERS, OPTIMIZER)
_State = Mapping[str, Mapping[Any, Any]]


@dataclass(frozen=True, kw_only=True)
class Division:
    """Division of a generation's snapshots, as one rank sees it.

    Attributes:
        count: the number of parts, one a rank.
        held: the parts that this rank has: its own, and those of which it is the holder.
        parts: for each pair of a model and an optimizer, the part of each parameter, by its name.
    """

    count: int
    held: frozenset[int]
    parts: tuple[Mapping[str, int], ...]

    @classmethod
    def of(
        cls, generation: Generation, rank: int, pairs: Sequence[Mapping[nn.Parameter, str]]
    ) -> Division:
        """Divide the parameters of all pairs, given with their names."""
        count = generation.world_size
        held = [each for each in range(count) if rank in (each, holder_of(generation, each))]
        sizes = [p.numel() * p.element_size() for names in pairs for p in names]
        numbers = iter(_numbers(sizes, count))
        parts = tuple({name: next(numbers) for name in names.values()} for names in pairs)
        return cls(count=count, held=frozenset(held), parts=parts)

    def own(self, pair: int, values: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return of values by parameters' names those that this rank has; new names are all's."""
        parts = self.parts[pair]
        return {
            name: value
            for name, value in values.items()
            if name not in parts or parts[name] in self.held
        }


def _numbers(sizes: Sequence[int], count: int) -> Iterator[int]:
    """Yield for each size its part: that in which the middle of it lies."""
    whole = max(1, sum(sizes))
    before = 0
    for size in sizes:
        yield min(count - 1, (2 * before + size) * count // (2 * whole))
        before += size


class DividedCopies:
    """Receiver of a snapshot: passes on to the store what this rank has of it."""

    def __init__(self, store: SnapshotStore, division: Division) -> None:
        self._store = store
        self._division = division
        self.hold = store.hold

    def open(self, name: SnapshotName) -> None:
        """Begin the snapshot, and note how it is divided."""
        division = self._division
        self._store.open(name)
        fields = {"count": division.count, "held": tuple(sorted(division.held))}
        self._store.add(name, {DIVISION: {**fields, "parts": division.parts}})

    def add(self, name: SnapshotName, parts: _State) -> None:
        """Copy this rank's part of values."""
        own = dict(parts)
        for pair in range(len(self._division.parts)):
            for part in (part + part_suffix(pair) for part in _DIVIDED):
                if part in own:
                    own[part] = self._division.own(pair, own[part])
        self._store.add(name, own)


def fetch_divided(state: _State, communicator: Communicator) -> tuple[dict[str, Any], int]:
    """Fetch the parts that this rank lacks of a divided snapshot; collective.

    Args:
        state: the parts of the snapshot, which stay as they are.
        communicator: connects ranks that together have all parts.

    Returns:
        the whole snapshot, and the bytes that were broadcast.

    Raises:
        CommError: a peer was lost, or silent; or no rank has a part.
    """
    what = "the fetch of a divided snapshot"
    division = state[DIVISION]
    has = torch.zeros(communicator.world_size, division["count"], dtype=torch.int64)
    has[communicator.rank, list(division["held"])] = 1
    has = total(communicator, has, what)
    whole: dict[str, Any] = {part: values for part, values in state.items() if part != DIVISION}
    fetched = 0
    for number in range(division["count"]):
        holders = has[:, number].nonzero().flatten().tolist()
        if not holders:
            raise CommError(f"No process has part {number} of the snapshot any more.")
        sends = communicator.rank == holders[0]
        chunks = pack_state(dict(_values(state, number))) if sends else []
        data = gather_bytes(communicator, b"".join(chunks), what)[holders[0]]
        fetched += len(data)
        for part, values in ({} if sends else unpack_state(data)).items():
            whole[part] = {**values, **whole.get(part, {})}  # its own, where it has them
    return whole, fetched


def _values(state: _State, number: int) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Yield what a part has, by the snapshot's parts."""
    for pair, parts in enumerate(state[DIVISION]["parts"]):
        for part in (part + part_suffix(pair) for part in _DIVIDED):
            values = state.get(part, {})
            yield part, {name: values[name] for name in values if parts.get(name) == number}


def wants_division(copies: SnapshotCopies, weights: int, workers: int) -> bool:
    """Return whether to divide snapshots, as far as a machine's memory says.

    Args:
        copies: the run's setting.
        weights: bytes of the parameters.
        workers: of this machine.
    """
    whole = _WHOLE_COPIES * weights * workers
    return copies == "divided" or (copies == "auto" and whole > _MOST * machine_memory())


def can_divide(generation: Generation) -> bool:
    """Return whether a division saves anything."""
    return generation.world_size >= _FEWEST


def note_of(generation: Generation) -> Message:
    """Return how a generation's snapshots are divided, and which losses it survives from memory."""
    size = generation.world_size
    machines = [member.machine for member in generation.members]
    holders = [holder_of(generation, rank) for rank in range(size)]
    apart = all(
        holder is not None and machines[rank] != machines[holder]
        for rank, holder in enumerate(holders)
    )
    lost = "any one process, or any one machine," if apart else "any one process"
    return Message(
        f"Snapshots in memory are divided among the {size} processes: each has its part and "
        f"another's. After the loss of {lost} the others continue from memory, and fetch what they "
        "lack from each other; where both that have a part are lost, they continue from the last "
        "checkpoint. With {--snapshot_copies} whole, each process has all of it, and any one can "
        "continue alone."
    )
