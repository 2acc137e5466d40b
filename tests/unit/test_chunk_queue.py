"""The queue of chunks and workers that are taken for dead, end at bad moments, or are slow."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from contextlib import closing

import pytest

from paceline.data.decoding.chunk_queue import Chunk, ChunkQueue


@pytest.fixture
def queue() -> Iterator[ChunkQueue]:
    with closing(ChunkQueue.create()) as queue:
        yield queue


def chunk_of(samples: int) -> Chunk:
    return Chunk(serial=1, maker=0, epoch=0, offset=0, count=samples, begin=0, end=samples)


def may_take(queue: ChunkQueue) -> bool:
    _, chunks, _ = queue.descriptors
    return bool(select.select([chunks], [], [], 0)[0])


def test_only_its_owner_finishes_a_chunk(queue: ChunkQueue) -> None:
    """A worker that was taken for dead continues while another makes its chunk again."""
    slots = queue.submit([chunk_of(4)])
    given_up = queue.take(1)
    assert given_up is not None
    queue.put_back(1)
    again = queue.take(2)
    assert again is not None
    queue.finish(1, given_up, 0)
    assert not queue.is_complete(slots)
    queue.finish(2, again, 0)
    assert queue.is_complete(slots)


def test_what_is_put_back_wakes_a_worker(queue: ChunkQueue) -> None:
    queue.submit([chunk_of(4)])
    assert queue.take(1) is not None
    assert not may_take(queue)
    ((chunk, sample),) = queue.put_back(1)
    assert (chunk.end, sample) == (4, 0)
    assert may_take(queue)


def test_a_worker_that_was_woken_and_ended_before_it_took_anything_leaves_no_chunk_behind(
    queue: ChunkQueue,
) -> None:
    queue.submit([chunk_of(4)])
    _, chunks, _ = queue.descriptors
    os.eventfd_read(chunks)
    assert queue.put_back(1) == []
    assert may_take(queue)


def test_a_worker_is_overdue_by_its_present_sample_and_only_while_others_finish_theirs(
    queue: ChunkQueue,
) -> None:
    slots = queue.submit([chunk_of(4), chunk_of(1)])
    assert queue.take(1) is not None
    other = queue.take(2)
    assert other is not None
    assert queue.overdue(slots, 0) == {}
    queue.finish(2, other, 0)
    assert queue.overdue(slots, 0) == {1: 0}
    queue.reach(1, 1)
    assert queue.overdue(slots, 0) == {}
