"""Records that give no sample: the run ends with a sentence, or goes on and counts without them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline.data.loader import Batch
from paceline.data.order import Order
from paceline.data.source import Record
from paceline.errors import DataError
from tests.harness.data.loading import (
    RICH,
    ListSource,
    Notes,
    epoch_of,
    joined,
    loader_of,
    photographs,
)

SIZE, BATCH = 23, 6
BAD = {2, 8, 9, 10, 17}  # damaged, unreadable, or with a label that there isn't


def some_bad() -> ListSource:
    records = photographs(SIZE)
    image = records[2].image
    assert isinstance(image, bytes)
    records[2] = Record(image[:-30], 0)
    records[8] = Record(b"no image", 0)
    records[9] = Record(records[9].image, 3)
    records[10] = Record(np.zeros((4, 4, 2), np.uint8), 0)
    return ListSource(records, unreadable)


def unreadable(index: int) -> None:
    if index == 17:
        raise DataError("record 17 is gone.")


def good_only(order: Order, epoch: int) -> list[list[int]]:
    """The good records of each step."""
    records = order.epoch_indices(epoch).tolist()
    return [
        [index for index in records[at : at + BATCH] if index not in BAD]
        for at in range(0, SIZE, BATCH)
    ]


def ranks_epochs(world_size: int, order: Order) -> list[list[Batch]]:
    """The batches of each step of epoch 1, over the ranks."""
    ranks = []
    for rank in range(world_size):
        with loader_of(
            some_bad(),
            BATCH,
            order=order,
            transform=RICH,
            num_labels=3,
            skip_bad=True,
            rank=rank,
            world_size=world_size,
        ) as loader:
            ranks.append(epoch_of(loader, 1))
    return [list(step) for step in zip(*ranks, strict=True)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_the_good_samples_of_a_global_batch_are_the_same_in_any_world(world_size: int) -> None:
    """The reference is a source without the bad records' contents, and the order's own list."""
    order = Order(size=SIZE, batch_size=BATCH, seed=4)
    with loader_of(ListSource(photographs(SIZE)), BATCH, order=order, transform=RICH) as loader:
        whole = epoch_of(loader, 1)
    for step, batches in enumerate(ranks_epochs(world_size, order)):
        expected = good_only(order, 1)[step]
        records = order.epoch_indices(1)[step * BATCH : (step + 1) * BATCH]
        kept = torch.from_numpy(~np.isin(records, list(BAD)))
        images, labels = joined(batches)
        assert labels.tolist() == [index % 3 for index in expected]
        assert torch.equal(images, whole[step].images[kept])
        assert sum(b.place.skipped for b in batches) == len(records) - len(expected)
        weights = [b.place.weight for b in batches]
        assert sum(weights) == pytest.approx(len(expected) / len(records))
        assert [replace(b.place, skipped=0) for b in batches] == [
            order.place(1, step, rank, world_size) for rank in range(world_size)
        ]


def test_the_mean_loss_weighs_each_good_sample_alike_in_any_world() -> None:
    order = Order(size=SIZE, batch_size=BATCH, seed=4)
    sums = []
    for world_size in (1, 2, 3, 7):
        sums.append(
            [
                sum(
                    float(batch.images.double().mean()) * batch.place.weight
                    for batch in batches
                    if batch.place.count
                )
                for batches in ranks_epochs(world_size, order)
            ]
        )
    for other in sums[1:]:
        assert other == pytest.approx(sums[0], rel=1e-12)


def test_a_share_of_bad_records_alone_is_one_blank_that_counts_nothing() -> None:
    order = Order(size=SIZE, batch_size=3, shuffle=False)
    options = {"order": order, "num_labels": 3, "skip_bad": True, "mean": (9.0,), "std": (2.0,)}
    with loader_of(some_bad(), 3, **options, rank=2, world_size=3) as loader:
        batch = loader.batch(0, 0)
    assert (batch.place.count, batch.place.skipped, batch.place.weight) == (0, 1, 0.0)
    assert batch.images.unique().tolist() == [0.0]
    assert batch.labels.tolist() == [0]


def test_a_bad_record_that_is_only_borrowed_is_not_counted() -> None:
    order = Order(size=3, batch_size=3, shuffle=False)
    source = ListSource([*photographs(2), Record(b"bad", 0)])
    notes = Notes()
    with loader_of(
        source, 3, order=order, rank=3, world_size=4, skip_bad=True, recorder=notes
    ) as loader:
        batch = loader.batch(0, 0)
    assert (batch.place.count, batch.place.skipped, notes.texts) == (0, 0, [])
    assert len(batch.images) == 1


def test_who_is_skipped_is_told_once_each_and_then_counted_by_epoch() -> None:
    records = [*photographs(40), *[Record(b"bad", 0)] * 9]
    order = Order(size=49, batch_size=7, shuffle=False)
    notes = Notes()
    with loader_of(ListSource(records), 7, order=order, skip_bad=True, recorder=notes) as loader:
        for epoch in (0, 0, 1):
            epoch_of(loader, epoch)
    assert [line.partition(" can't")[0] for line in notes.texts[:5]] == [
        f"rank 0 skips a bad record: record {index}" for index in range(40, 45)
    ]
    assert notes.texts[5] == "rank 0 skips more bad records; they are counted and no longer named."
    assert [line.partition(", the first of them: record 40 ")[0] for line in notes.texts[6:]] == [
        f"rank 0 skipped 9 bad records of epoch {epoch}" for epoch in (0, 0, 1)
    ]


def test_data_that_are_mostly_bad_end_the_run() -> None:
    records = [*photographs(40), *[Record(b"bad", 0)] * 60]
    order = Order(size=100, batch_size=10, shuffle=False)
    with loader_of(ListSource(records), 10, order=order, skip_bad=True) as loader:
        for step in range(8):
            loader.batch(0, step)
        with pytest.raises(DataError, match=r"50 of the 90 records .* too many to skip.*record 89"):
            loader.batch(0, 8)


@pytest.mark.parametrize(
    ("index", "told"),
    [
        (2, "record 2 can't be decoded: Premature end of JPEG file"),
        (8, "record 8 can't be decoded: it is not an image of a known format"),
        (9, "record 9 has the label 3, but with --num_labels 3, labels must be 0 to 2"),
        (10, r"record 10 has pixels of shape \(4, 4, 2\)"),
        (17, "record 17 is gone"),
    ],
)
def test_otherwise_each_ends_its_batch_with_key_and_remedy(index: int, told: str) -> None:
    order = Order(size=SIZE, batch_size=1, shuffle=False)
    with loader_of(some_bad(), 1, order=order, num_labels=3) as loader:
        assert loader.batch(0, 0).place.count == 1
        with pytest.raises(DataError, match=f"{told}.*--bad_records skip.*paceline db info"):
            loader.batch(0, index)


def test_the_first_bad_record_of_a_batch_is_the_one_that_is_named() -> None:
    order = Order(size=SIZE, batch_size=SIZE, shuffle=False)
    with (
        loader_of(some_bad(), SIZE, order=order, num_labels=3) as loader,
        pytest.raises(DataError, match="record 2 "),
    ):
        loader.batch(0, 0)
