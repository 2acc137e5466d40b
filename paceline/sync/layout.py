"""Where everything lies in a rank's window, a pure function of the runs' sizes.

A *run* is what is exchanged at once: a bucket, or the running statistics. Rank r owns shard r of
every run: it adds up what all ranks have of it. In its window there is room for what each peer puts
there, and for the sums of all shards, which their owners put back:

    run 0                                            run 1
    [ from rank 0 | from rank 1 | … ][ sum, whole ]  [ … ]       of shard r, but for the sum

Notification i of a peer tells of its part of run i, `runs + i` of the sum of its shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

_ALIGN = 64  # bytes, a cache line


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run's places.

    Attributes:
        index: its number.
        numel: values.
        dtype: of the values.
        bounds: (world_size + 1,), where shards begin and end, in values.
        parts: bytes from the window's start to the room for rank 0's part.
        stride: bytes from a rank's room to the next one's.
        sum: bytes from the window's start to the sum.
    """

    index: int
    numel: int
    dtype: torch.dtype
    bounds: tuple[int, ...]
    parts: int
    stride: int
    sum: int

    def shard(self, rank: int) -> slice:
        """The values that a rank owns."""
        return slice(self.bounds[rank], self.bounds[rank + 1])

    def part(self, sender: int) -> int:
        """Bytes to where a sender's part of the owner's shard lands, in the owner's window."""
        return self.parts + sender * self.stride

    def sum_of(self, owner: int) -> int:
        """Bytes to where the sum of an owner's shard lands, in everybody's window."""
        return self.sum + self.bounds[owner] * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Layout:
    """All runs' places.

    Attributes:
        runs: in their order.
        size: bytes of a window.
    """

    runs: tuple[Run, ...]
    size: int

    @property
    def notifications(self) -> int:
        """How many a peer has."""
        return 2 * len(self.runs)


def lay_out(sizes: Sequence[tuple[int, torch.dtype]], world_size: int) -> Layout:
    """Lay runs of so many values of a dtype out, for so many ranks."""
    runs, at = [], 0
    for index, (numel, dtype) in enumerate(sizes):
        bounds = tuple(rank * numel // world_size for rank in range(world_size + 1))
        longest = max(b - a for a, b in pairwise(bounds))
        stride = _aligned(longest * dtype.itemsize)
        total = at + world_size * stride
        run = Run(
            index=index,
            numel=numel,
            dtype=dtype,
            bounds=bounds,
            parts=at,
            stride=stride,
            sum=total,
        )
        runs.append(run)
        at = total + _aligned(numel * dtype.itemsize)
    return Layout(runs=tuple(runs), size=at)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
