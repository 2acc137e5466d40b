"""Offsets between the ranks' clocks, by a few rounds of messages.

    rank 0   sent ─┐              ┌─ received          all_reduce, and all_reduce of the times
    rank r         └──── time ────┘                 sent ≤ time ≤ received, on one clock

No rank completes the first all_reduce before rank 0 has begun it, and rank 0 doesn't complete the
second before all ranks have read their clocks. The shortest round is used: an offset's error is at
most half of its length, some tens of microseconds on a network of one switch. Ranks of one running
system read the same clock, so the offset is 0 between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from paceline.comm.communicator import Communicator, total

_ROUNDS = 16
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Round(NamedTuple):
    """Clock-comparison round trip; all times are in nanoseconds.

    Attributes:
        sent, received: start and end of the round trip, by rank 0's clock.
        times: for each rank, the time of its clock during the round trip.
    """

    sent: int
    received: int
    times: Sequence[int]


def rounds(communicator: Communicator, clock: Callable[[], int]) -> list[Round]:
    """Make rounds, which rank 0 can use; collective.

    Args:
        communicator: the ranks.
        clock: this rank's.
    """
    return [_round(communicator, clock) for _ in range(_ROUNDS)]


def offsets(made: Sequence[Round], systems: Sequence[str]) -> list[int]:
    """Return what to add to each rank's clock to get rank 0's, in nanoseconds.

    Args:
        systems: of each rank, the running system.
    """
    best = min(made, key=lambda round: round.received - round.sent)
    middle = (best.sent + best.received) // 2
    return [
        0 if system == systems[0] else middle - best.times[systems.index(system)]
        for system in systems
    ]


def running_system() -> str:
    """Name the running system: processes that name the same one read the same clock."""
    return _BOOT.read_text().strip()


def _round(communicator: Communicator, clock: Callable[[], int]) -> Round:
    operation = "comparing clocks"
    times = torch.zeros(communicator.world_size, dtype=torch.int64)
    sent = clock()
    total(communicator, times, operation)
    times[communicator.rank] = clock()
    known = total(communicator, times, operation).tolist()
    return Round(sent, clock(), known)
