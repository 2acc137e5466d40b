"""Backup holders: which member keeps a copy of what another member alone owns of each snapshot.

Machines' ranks follow each other, so a shift by the workers of the largest machine, k, reaches
another machine from every rank, and is a permutation, as long as 2 k <= world size:

    machine       0     1     2             rank      0  1  2  3  4  5
    ranks        0 1   2 3   4 5    k = 2   holder    2  3  4  5  0  1

A machine with more than half of the ranks deals them out to all others in turn, and its ranks hold
the copies of the others':

    machine         0         1             rank      0  1  2  3  4
    ranks        0 1 2       3 4            holder    3  4  3  0  1

On one machine the holder is the next rank: it survives the loss of a process, not of the machine.

Where several ranks have a replica of the model together, all of this is of the ranks that have the
same part: the other ranks of a lost replica leave with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from paceline.cluster.membership.generation import Generation


def holder_of(generation: Generation, rank: int) -> int | None:
    """Return the backup holder's rank; None where no other rank has the same part of the model.

    It is on another machine where there is one. No rank is the holder of more others than needed.
    """
    assert 0 <= rank < generation.world_size
    line = generation.holders_of_part(rank)
    workers = [*Counter(generation.machine_of(each) for each in line).values()]
    holder = _holder(workers, line.index(rank))
    return None if holder is None else line[holder]


def _holder(workers: Sequence[int], rank: int) -> int | None:
    """Return the holder of one of some ranks, given the numbers of them on each machine."""
    size = sum(workers)
    if size == 1:
        return None
    if len(workers) == 1:
        return (rank + 1) % size
    largest = max(workers)
    if 2 * largest <= size:
        return (rank + largest) % size
    machine = workers.index(largest)
    start = list(accumulate(workers, initial=0))[machine]
    inside = range(start, start + largest)
    outside = [other for other in range(size) if other not in inside]
    if rank in inside:
        return outside[(rank - start) % len(outside)]
    return inside[outside.index(rank)]
