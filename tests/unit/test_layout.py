"""A window's places: shards cover every run, and no two places overlap."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.sync.layout import Layout, lay_out

SIZES = st.lists(
    st.tuples(st.integers(1, 5000), st.sampled_from([torch.float32, torch.float64])), max_size=6
)


def places(layout: Layout, owner: int, world_size: int) -> Iterator[tuple[int, int]]:
    """Name the bytes of everything that is put into an owner's window."""
    for run in layout.runs:
        own = run.shard(owner)
        for sender in range(world_size):
            start = run.part(sender)
            yield start, start + (own.stop - own.start) * run.dtype.itemsize
            theirs = run.shard(sender)
            start = run.sum_of(sender)
            yield start, start + (theirs.stop - theirs.start) * run.dtype.itemsize


@given(sizes=SIZES, world_size=st.integers(1, 9))
def test_shards_cover_a_run_and_nothing_overlaps(
    sizes: list[tuple[int, torch.dtype]], world_size: int
) -> None:
    layout = lay_out(sizes, world_size)
    for run, (numel, _) in zip(layout.runs, sizes, strict=True):
        values = [value for rank in range(world_size) for value in range(numel)[run.shard(rank)]]
        assert values == list(range(numel))
    for owner in range(world_size):
        taken = sorted(place for place in places(layout, owner, world_size) if place[0] < place[1])
        assert all(end <= start for (_, end), (start, _) in pairwise(taken))
        assert all(end <= layout.size for _, end in taken)
        assert all(start % dtype.itemsize == 0 for start, dtype in starts(layout))


def starts(layout: Layout) -> Iterator[tuple[int, torch.dtype]]:
    for run in layout.runs:
        yield run.parts, run.dtype
        yield run.sum, run.dtype
