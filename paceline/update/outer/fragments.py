"""Fragments: the parts of the model that are merged at different steps of a round."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from paceline.errors import ConfigError, Message


def cut_into_fragments(sizes: Sequence[int], fragments: int) -> list[range]:
    """Divide buckets into fragments: ranges of indices, balanced by bytes.

    Of all divisions into contiguous ranges, none empty, this is one whose largest fragment is
    smallest, so that the peak of the traffic is lowest. Streaming DiLoCo
    (arXiv 2501.18512) also has strided fragments, every P-th layer, with slightly better losses for
    transformers, whose layers have equal sizes. Here sizes differ widely.

    Args:
        sizes: bytes of each bucket, in the model's order.
        fragments: the number of fragments, at most the number of buckets.

    Raises:
        ConfigError: there are more fragments than buckets.
    """
    if not 1 <= fragments <= max(1, len(sizes)):
        raise ConfigError(
            flag="fragments",
            value=fragments,
            rule=f"must be from 1 to {len(sizes)}, the number of the model's buckets",
            remedy=Message("use fewer fragments, or smaller buckets by {--bucket_mb}"),
        )
    low = max(sizes, default=0)
    high = sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if _ranges_within(sizes, middle) <= fragments:
            high = middle
        else:
            low = middle + 1
    return _cut(sizes, fragments, low)


def _ranges_within(sizes: Sequence[int], most: int) -> int:
    """Return the least number of ranges of at most `most` bytes."""
    count = 1
    total = 0
    for size in sizes:
        if total + size > most:
            count = count + 1
            total = 0
        total += size
    return count


def _cut(sizes: Sequence[int], fragments: int, most: int) -> list[range]:
    """Cut into exactly `fragments` ranges of at most `most` bytes, none empty."""
    starts = [0]
    total = 0
    for index, size in enumerate(sizes):
        to_start = fragments - len(starts)
        full = total + size > most or len(sizes) - index == to_start
        if index > 0 and to_start > 0 and full:
            starts.append(index)
            total = 0
        total += size
    return [range(start, stop) for start, stop in pairwise([*starts, len(sizes)])]
