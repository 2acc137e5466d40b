"""The loader: the same batch whoever makes it, ahead or not; errors and ends that don't hang."""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np
import pytest
import torch

from paceline.data.image.augment import Transform
from paceline.data.loader import Batch
from paceline.data.order import Order
from paceline.data.shares import divide
from paceline.data.source import Pixels, Record
from paceline.data.synthetic import SyntheticSource
from paceline.errors import DataError
from tests.harness.data.loading import (
    RICH,
    ListSource,
    epoch_of,
    joined,
    loader_of,
    numbered,
    photographs,
)


def test_an_epoch_is_the_orders_records_in_their_order() -> None:
    order = Order(size=22, batch_size=5, seed=9)
    with loader_of(ListSource(numbered(22)), 5, order=order) as loader:
        batches = epoch_of(loader, epoch=4)
    assert [batch.place.count for batch in batches] == [5, 5, 5, 5, 2]
    assert [batch.place.weight for batch in batches] == [1.0] * 5
    labels = torch.cat([batch.labels for batch in batches])
    assert labels.dtype == torch.int64
    assert labels.tolist() == order.epoch_indices(4).tolist()
    images = torch.cat([batch.images for batch in batches])
    assert torch.equal(images, labels.view(-1, 1, 1, 1).expand(-1, 3, 8, 8).float())


def test_images_are_normalised_per_channel() -> None:
    mean, std = (10.0, 128.0, 60.5), (64.0, 2.5, 58.0)
    source = SyntheticSource(6, 8, 3, 10)
    with loader_of(
        source, 6, order=Order(size=6, batch_size=6, shuffle=False), mean=mean, std=std
    ) as (loader):
        images = loader.batch(0, 0).images
    pixels = np.stack([source[index].image for index in range(6)]).astype(np.float64)
    expected = ((pixels - mean) / std).transpose(0, 3, 1, 2)
    assert images.dtype == torch.float32
    assert images.shape == (6, 3, 8, 8)
    assert np.abs(images.numpy() - expected).max() < 1e-4


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("channels_last", [True, False])
def test_images_lie_in_memory_as_asked_for(channels: int, channels_last: bool) -> None:
    transform = Transform(augment="none", image_size=8, channels=channels)
    with loader_of(
        ListSource(numbered(4)), 4, transform=transform, channels_last=channels_last
    ) as loader:
        images = loader.batch(0, 0).images
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert images.shape == (4, channels, 8, 8)
    assert images.is_contiguous(memory_format=layout)


def test_padding_is_zero_after_normalisation() -> None:
    white = [Record(np.full((8, 8, 3), 255, np.uint8), 0)] * 40
    transform = Transform(augment="pad", image_size=8)
    with loader_of(
        ListSource(white), 40, transform=transform, mean=(128.0,), std=(128.0,)
    ) as loader:
        values = loader.batch(0, 0).images.unique().tolist()
    assert values == [0.0, pytest.approx(127 / 128)]


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_a_global_batch_is_bit_identical_for_any_world(world_size: int) -> None:
    source = ListSource(photographs(23))
    with loader_of(source, 10, transform=RICH) as loader:
        alone = epoch_of(loader, epoch=1)
    shares = []
    for rank in range(world_size):
        with loader_of(source, 10, transform=RICH, rank=rank, world_size=world_size) as loader:
            shares.append(epoch_of(loader, epoch=1))
    for step, whole in enumerate(alone):
        images, labels = joined([batches[step] for batches in shares])
        assert torch.equal(images, whole.images)
        assert torch.equal(labels, whole.labels)
        assert sum(batches[step].place.weight for batches in shares) == pytest.approx(1)


@pytest.mark.parametrize("prefetch", [0, 5])
def test_a_batch_does_not_depend_on_what_is_made_ahead(prefetch: int) -> None:
    source = ListSource(photographs(12))
    with loader_of(source, 5, transform=RICH) as loader:
        expected = [*epoch_of(loader, 0), *epoch_of(loader, 1)]
    with loader_of(source, 5, transform=RICH, prefetch=prefetch) as loader:
        found = [*epoch_of(loader, 0), *epoch_of(loader, 1)]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.images, theirs.images)
        assert torch.equal(ours.labels, theirs.labels)


def test_an_epochs_augmentation_is_another_ones_no_more() -> None:
    with loader_of(ListSource(photographs(4)), 4, transform=RICH) as loader:
        first = {tuple(image.flatten().tolist()) for image in loader.batch(0, 0).images}
        second = {tuple(image.flatten().tolist()) for image in loader.batch(1, 0).images}
    assert not first & second


def test_a_rank_without_samples_borrows_one_that_counts_nothing() -> None:
    source = ListSource(numbered(12))
    with loader_of(source, 10, rank=2, world_size=4) as loader:
        batch = loader.batch(0, 1)  # two samples for four ranks
    assert batch.images.shape == (1, 3, 8, 8)
    assert (batch.place.count, batch.place.weight) == (0, 0.0)
    assert (batch.place.first, batch.place.last, batch.place.global_count) == (12, 12, 2)


def test_a_batch_is_that_of_the_rank_at_the_time_it_is_taken() -> None:
    source, worlds = ListSource(photographs(23)), [(0, 1), (1, 3), (0, 2)]
    now = iter(worlds)
    with loader_of(source, 10, transform=RICH, rank_and_size=lambda: next(now)) as loader:
        found = epoch_of(loader)
    for step, (rank, world_size) in enumerate(worlds):
        with loader_of(
            source, 10, transform=RICH, rank=rank, world_size=world_size, prefetch=0
        ) as loader:
            expected = loader.batch(0, step)
        assert found[step].place == expected.place
        assert torch.equal(found[step].images, expected.images)
        assert torch.equal(found[step].labels, expected.labels)


def test_batches_begun_for_other_shares_are_those_of_the_new_ones() -> None:
    planned = [(5, 5), (8, 2), (1, 9), (0, 10), (10, 0), (5, 5), (3, 7)]
    made = []
    for rank in range(2):
        now = [0]
        with loader_of(
            ListSource(photographs(67)),
            10,
            transform=RICH,
            rank=rank,
            world_size=2,
            shares=lambda number, now=now: planned[now[0]],
        ) as loader:
            batches = []
            for now[0] in range(loader.steps):  # all that is begun ahead has the present shares
                batches.append(loader.batch(0, now[0]))
        made.append(batches)
    for step, (shares, pair) in enumerate(zip(planned, zip(*made, strict=True), strict=True)):
        with loader_of(ListSource(photographs(67)), 10, transform=RICH) as loader:
            whole = loader.batch(0, step)
        images, labels = joined(list(pair))
        assert torch.equal(images, whole.images)
        assert torch.equal(labels, whole.labels)
        counts = divide(len(whole.labels), shares)
        assert tuple(batch.place.count for batch in pair) == counts


def test_what_is_begun_for_another_share_is_not_read_again() -> None:
    read: Counter[int] = Counter()

    class Counted(ListSource):
        def __getitem__(self, index: int) -> Record:
            read[index] += 1
            return super().__getitem__(index)

    now = [(5, 5)]
    with loader_of(Counted(numbered(40)), 10, world_size=2, shares=lambda number: now[0]) as loader:
        loader.batch(0, 0)  # and 5 samples each of the next two
        now[0] = (9, 1)
        loader.batch(0, 1)
    assert set(read.values()) == {1}
    assert sum(read.values()) >= 5 + 9


@pytest.mark.parametrize("skip", [False, True])
def test_a_bad_record_that_was_begun_for_another_share_is_still_bad(skip: bool) -> None:
    records = numbered(30)
    order = Order(size=30, batch_size=10, seed=2)
    bad = int(order.epoch_indices(0)[11])
    records[bad] = Record(b"no image", 0)
    now = [(5, 5)]
    with loader_of(
        ListSource(records),
        10,
        order=order,
        world_size=2,
        shares=lambda number: now[0],
        skip_bad=skip,
    ) as loader:
        loader.batch(0, 0)
        now[0] = (7, 3)
        if skip:
            place = loader.batch(0, 1).place
            assert (place.count, place.skipped) == (6, 1)
        else:
            with pytest.raises(DataError):
                loader.batch(0, 1)


def test_jumping_back_gives_the_same_batches_again() -> None:
    with loader_of(ListSource(photographs(30)), 4, transform=RICH) as loader:
        first = [loader.batch(3, step) for step in (0, 1, 2, 3)]
        again = [loader.batch(3, step) for step in (1, 2, 0, 3)]
    for step, batch in zip((1, 2, 0, 3), again, strict=True):
        assert torch.equal(batch.images, first[step].images)


def test_the_next_batches_are_made_ahead_and_no_more() -> None:
    read, seen = [], threading.Condition()

    def on_read(index: int) -> None:
        with seen:
            read.append(index)
            seen.notify()

    order = Order(size=6, batch_size=2, shuffle=False)
    with loader_of(ListSource(numbered(6), on_read), 2, order=order, prefetch=2) as loader:
        loader.batch(0, 1)  # asks for step 1, then 2, then the next epoch's first
        with seen:
            assert seen.wait_for(lambda: len(read) == 6, timeout=10)
    assert sorted(read) == [0, 1, 2, 3, 4, 5]


def test_nothing_is_made_ahead_beyond_the_last_epoch() -> None:
    read: list[int] = []
    order = Order(size=6, batch_size=2, shuffle=False)
    with loader_of(ListSource(numbered(6), read.append), 2, order=order, epochs=2) as loader:
        loader.batch(1, 1)
        loader.batch(1, 1)  # its one thread has done by now all that was begun before
        assert sorted(set(read)) == [2, 3, 4, 5]  # and not 0 and 1, with which epoch 2 would begin
        assert loader.batch(1, 2).labels.tolist() == [4, 5]


@pytest.mark.parametrize(("epoch", "step"), [(0, 3), (2, 1), (5, 6)])
def test_a_run_goes_on_at_any_step_with_the_bits_of_an_uninterrupted_one(
    epoch: int, step: int
) -> None:
    source = ListSource(photographs(27))
    with loader_of(source, 4, transform=RICH) as loader:
        whole = [batch for number in range(epoch + 1) for batch in epoch_of(loader, number)]
    with loader_of(source, 4, transform=RICH) as loader:
        after = loader.batch(epoch, step)
    expected = whole[epoch * 7 + step]
    assert after.place == expected.place
    assert torch.equal(after.images, expected.images)
    assert torch.equal(after.labels, expected.labels)


def test_a_damaged_image_is_an_error_of_its_batch_that_names_the_record() -> None:
    records = numbered(12)
    records[7] = Record(b"\xff\xd8\xff nothing", 0)
    order = Order(size=12, batch_size=3, shuffle=False)
    with loader_of(ListSource(records), 3, order=order) as loader:
        assert loader.batch(0, 1).place.count == 3
        for _ in range(2):
            with pytest.raises(DataError, match=r"record 7 can't be decoded: .*--bad_records skip"):
                loader.batch(0, 2)
        assert loader.batch(0, 3).labels.tolist() == [9, 10, 11]


@pytest.mark.parametrize("label", [-1, 10])
def test_a_label_out_of_range_is_an_error_that_names_record_label_and_rule(label: int) -> None:
    records = [Record(np.zeros((8, 8, 3), np.uint8), 9)] * 5
    records[3] = Record(records[0].image, label)
    with (
        loader_of(ListSource(records), 5, num_labels=10) as loader,
        pytest.raises(DataError, match=f"record 3 has the label {label}.* 0 to 9: "),
    ):
        loader.batch(0, 0)


def test_any_error_of_a_source_comes_to_the_caller() -> None:
    def fail(index: int) -> None:
        raise DataError(f"key {index} is gone")

    with (
        loader_of(ListSource(numbered(4), fail), 2) as loader,
        pytest.raises(DataError, match=r"key \d is gone"),
    ):
        loader.batch(0, 0)


def test_a_source_that_hangs_is_an_error_within_the_limit() -> None:
    go_on = threading.Event()
    source = ListSource(numbered(8), lambda index: go_on.wait(30))
    with loader_of(source, 4, timeout=0.05) as loader:
        with pytest.raises(DataError, match=r"epoch 0, step 0 wasn't read within 0\.05 s"):
            loader.batch(0, 0)
        go_on.set()


def test_closing_ends_the_thread() -> None:
    before = set(threading.enumerate())
    with loader_of(SyntheticSource(400, 8, 3, 10), 100) as loader:
        loader.batch(0, 0)
        threads = set(threading.enumerate()) - before
        assert [thread.name for thread in threads] == ["paceline-decode"]
    for thread in threads:
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_closing_waits_for_what_is_being_read_and_begins_nothing_more() -> None:
    reading, go_on = threading.Event(), threading.Event()
    read: list[int] = []

    def on_read(index: int) -> None:
        reading.set()
        go_on.wait(30)
        read.append(index)

    with loader_of(ListSource(numbered(100), on_read), 100, timeout=0.01) as loader:
        with pytest.raises(DataError):
            loader.batch(0, 0)
        assert reading.wait(10)
        closing = threading.Thread(target=loader.close)
        closing.start()
        closing.join(timeout=0.1)
        assert closing.is_alive()  # a caller who closed the source now would pull it away
        go_on.set()
        closing.join(timeout=10)
    assert 1 <= len(read) < 10  # the task that ran to its end


def test_closing_does_not_wait_for_ever_for_a_read_that_hangs() -> None:
    reading, go_on, read = threading.Event(), threading.Event(), threading.Event()

    def on_read(index: int) -> None:
        reading.set()
        go_on.wait(60)
        read.set()

    with loader_of(ListSource(numbered(8), on_read), 8, timeout=0.01) as loader:
        with pytest.raises(DataError):
            loader.batch(0, 0)
        assert reading.wait(10)
    assert not read.is_set()
    go_on.set()
    assert read.wait(10)


def test_pixels_of_a_batch_do_not_change_under_a_caller_that_keeps_it() -> None:
    with loader_of(ListSource(photographs(20)), 2, transform=RICH) as loader:
        kept: list[tuple[Batch, Pixels]] = []
        for step in range(loader.steps):
            batch = loader.batch(0, step)
            kept.append((batch, batch.images.numpy().copy()))
    for batch, pixels in kept:
        assert np.array_equal(batch.images.numpy(), pixels)
