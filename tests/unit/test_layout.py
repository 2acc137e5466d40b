"""A window's places: shards cover every run, and no two places overlap."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.codecs.merge_codecs import MERGE_CODECS, merge_codec
from paceline.reduce.put_engine.layout import (
    BucketLayout,
    BucketSpec,
    BufferArray,
    Layout,
    Topology,
    lay_out,
)

CODECS = [*MERGE_CODECS.values(), merge_codec("topk:0.02"), merge_codec("topk:0.3:4")]
SPECS = st.builds(
    lambda returned, codec, **others: BucketSpec(
        codec=codec, return_codec=codec and returned, **others
    ),
    returned=st.sampled_from(CODECS),
    lengths=st.lists(st.integers(0, 3000), min_size=1, max_size=5).map(tuple),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    codec=st.sampled_from(CODECS),
    suppresses_zeros=st.booleans(),
)
MACHINES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def places(layout: Layout) -> Iterator[tuple[int, int]]:
    """Name the bytes of all that may be written into a window."""
    for bucket_layout in layout.buckets:
        for buffers, size in sizes(bucket_layout):
            yield from (
                (buffers[number], buffers[number] + size) for number in range(buffers.count)
            )
        yield (
            bucket_layout.sums,
            bucket_layout.sums + bucket_layout.numel * bucket_layout.spec.dtype.itemsize,
        )
        yield bucket_layout.flags, bucket_layout.flags + len(bucket_layout.spec.lengths)


def sizes(bucket_layout: BucketLayout) -> list[tuple[BufferArray, int]]:
    """Return how many bytes may come into each kind of room."""
    shards = [b - a for bounds in bucket_layout.shards for a, b in pairwise(bounds)]
    spec = bucket_layout.spec
    return [
        (
            bucket_layout.contribution,
            spec.header_size + bucket_layout.numel * spec.dtype.itemsize,
        ),
        (bucket_layout.from_groups, spec.header_size + max(map(spec.contribution_size, shards))),
        (bucket_layout.returned_sums, max(map(spec.sum_size, shards))),
    ]


@given(specs=st.lists(SPECS, max_size=4), machines=MACHINES)
def test_shards_cover_a_run_and_nothing_overlaps(
    specs: list[BucketSpec], machines: list[int]
) -> None:
    topology = Topology.of(machines)
    layout = lay_out(specs, topology)
    for bucket_layout, spec in zip(layout.buckets, specs, strict=True):
        local_shards, groups = range(topology.local_shards), range(len(topology.groups))
        values = [
            v
            for c in local_shards
            for g in groups
            for v in range(bucket_layout.numel)[bucket_layout.shard(c, g)]
        ]
        assert values == list(range(sum(spec.lengths)))
    taken = sorted(place for place in places(layout) if place[0] < place[1])
    assert all(end <= start for (_, end), (start, _) in pairwise(taken))
    assert all(end <= layout.size for _, end in taken)
    starts = [
        buffer
        for bucket_layout in layout.buckets
        for buffers, _ in sizes(bucket_layout)
        for buffer in [buffers.offset]
    ]
    assert all(
        start % 64 == 0
        for start in [*starts, *(bucket_layout.sums for bucket_layout in layout.buckets)]
    )


@given(machines=MACHINES)
def test_each_rank_is_in_the_group_of_its_machine(machines: list[int]) -> None:
    topology = Topology.of(machines)
    assert [len(group) for group in topology.groups] == machines
    assert [rank for group in topology.groups for rank in group] == list(range(sum(machines)))
    assert topology.local_shards == min(machines)
    alone = Topology.of([1] * len(machines))
    assert alone.groups == tuple((rank,) for rank in range(len(machines)))


def test_a_server_owns_all_shards_and_its_window_alone_receives_contributions() -> None:
    specs = [BucketSpec(lengths=(1000,), dtype=torch.float32, codec=merge_codec("int8"))]
    topology = Topology.of([2, 1]).served_by("the server")
    assert topology.ranks == (0, 1, 2, 3)
    assert (topology.owners, topology.contributors) == ((3,), (0, 1, 2))
    assert topology.workers == Topology.of([2, 1])
    layout = lay_out(specs, topology)
    (bucket,) = layout.buckets
    assert bucket.shards == ((0, 0, 0, 1000),)
    assert bucket.returned_sums.count == 0
    assert (bucket.from_groups.offset, bucket.from_groups.count) == (layout.size, 2)
    assert bucket.from_groups.end == layout.server_size
    contribution, sums = bucket.spec.header_size + specs[0].encoded_size(1000), 4000
    assert bucket.traffic(0, 0) == bucket.traffic(0, 1) == (contribution, sums)
    assert bucket.traffic(0, 2) == (2 * sums, 2 * contribution)
    assert bucket.traffic(None, 0) == (0, 0)


def test_servers_own_equal_parts_of_every_bucket() -> None:
    specs = [BucketSpec(lengths=(n,), dtype=torch.float32) for n in (1600, 320)]
    topology = Topology.of([2, 1]).served_by("one", "another")
    assert (topology.owners, topology.contributors) == ((3, 4), (0, 1, 2))
    layout = lay_out(specs, topology)
    assert [b.shards for b in layout.buckets] == [((0, 0, 0, 800, 1600),), ((0, 0, 0, 160, 320),)]
    contribution = specs[0].header_size + 3200
    assert layout.buckets[0].traffic(0, 1) == (2 * contribution, 6400)
    for server in (2, 3):
        assert layout.buckets[0].traffic(0, server) == (6400, 2 * contribution)


def test_without_servers_owners_are_contributors() -> None:
    topology = Topology.of([3, 2])
    assert (topology.owners, topology.contributors) == ((0, 1, 3, 4), (0, 1, 2, 3, 4))


@given(
    lengths=st.lists(st.integers(0, 3000), min_size=1, max_size=4),
    machines=MACHINES,
    slots=st.integers(1, 4),
    servers=st.integers(0, 3),
)
def test_no_two_slots_overlap(
    lengths: list[int], machines: list[int], slots: int, servers: int
) -> None:
    specs = [BucketSpec(lengths=(n, 3), dtype=torch.float64, slots=slots) for n in lengths]
    topology = Topology.of(machines).served_by(*["a server"] * servers)
    layout = lay_out(specs, topology)
    taken: list[tuple[int, int]] = []
    for number in range(slots):
        taken += places(replace(layout, slots=tuple((each[number],) for each in layout.slots)))
    taken = sorted(place for place in taken if place[0] < place[1])
    assert all(end <= start for (_, end), (start, _) in pairwise(taken))
    assert all(end <= (layout.server_size if servers else layout.size) for _, end in taken)
