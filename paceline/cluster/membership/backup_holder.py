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
"""

from __future__ import annotations

from itertools import accumulate

from paceline.cluster.membership.generation import Generation


def holder_of(generation: Generation, rank: int) -> int | None:
    """Return the backup holder's rank; None in a world of one.

    It is on another machine where there is one. No rank is the holder of more others than needed.
    """
    workers = generation.workers_per_machine
    size = generation.world_size
    assert 0 <= rank < size
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
