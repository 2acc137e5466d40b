"""Whether the ranks' slices cover a batch exactly.

    columns  0       16       32       48
    rank 0   |--------|
    rank 1                |-------------|
    lost              |---|

Nothing else is known of a batch than its length.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

Columns = tuple[int, int]  # from the first one to the one after the last


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Coverage of a batch's columns (sample positions) by the ranks' slices.

    Attributes:
        once: number of columns that exactly one slice covers.
        lost: columns that no slice covers.
        twice: columns that more than one slice covers, and columns outside the batch that a slice
            covers.
    """

    once: int
    lost: tuple[Columns, ...]
    twice: tuple[Columns, ...]


def tile(shares: Iterable[Columns], length: int) -> Tiling:
    """Cover the columns 0 to `length` with shares; one that ends before it begins is empty."""
    depth = {0: 0, length: 0}  # at a column: how many shares begin there, less those that end
    for first, last in shares:
        if first < last:
            depth[first] = depth.get(first, 0) + 1
            depth[last] = depth.get(last, 0) - 1
    once = 0
    covers = 0
    lost: list[Columns] = []
    twice: list[Columns] = []
    for begin, end in pairwise(sorted(depth)):
        covers += depth[begin]
        inside = 0 <= begin < length
        if inside and covers == 1:
            once += end - begin
        elif inside and covers == 0:
            _extend(lost, begin, end)
        elif covers:
            _extend(twice, begin, end)
    return Tiling(once=once, lost=tuple(lost), twice=tuple(twice))


def size(columns: Iterable[Columns]) -> int:
    """Count columns."""
    return sum(last - first for first, last in columns)


def _extend(parts: list[Columns], begin: int, end: int) -> None:
    """Append a part, or lengthen the last one if it ends there."""
    if parts and parts[-1][1] == begin:
        begin, _ = parts.pop()
    parts.append((begin, end))
