"""The loader: the same batch whoever makes it, ahead or not; errors and ends that don't hang."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from paceline.data.augment import Transform
from paceline.data.loader import Batch, Loader
from paceline.data.order import Order
from paceline.data.source import Pixels, Record
from paceline.data.synthetic import SyntheticSource
from paceline.errors import DataError

CPU = torch.device("cpu")
PLAIN = Transform(augment="none", image_size=8)
RICH = Transform(augment="inception", image_size=8, scale=9, color_jitter=0.4, seed=5)


class ListSource:
    """Records from a list, each read of one told to a function first."""

    labels: npt.NDArray[np.int64] | None = None
    label_names: tuple[str, ...] | None = None
    index_note: str | None = None
    fingerprint = "list"

    def __init__(self, records: list[Record], on_read: Callable[[int], object] = lambda i: None):
        self._records = records
        self._on_read = on_read

    def name(self, index: int) -> str:
        return f"record {index}"

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Record:
        self._on_read(index)
        return self._records[index]

    def close(self) -> None: ...


def _numbered(count: int) -> list[Record]:
    """Records whose pixels and labels are their numbers."""
    return [Record(np.full((8, 8, 3), index, np.uint8), index) for index in range(count)]


def _photographs(count: int) -> list[Record]:
    """JPEG records of several sizes."""
    records = []
    for index in range(count):
        random = np.random.default_rng(index)
        small = random.integers(0, 256, (4, 5, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(small).resize((20 + index, 18)).save(file, "JPEG")
        records.append(Record(file.getvalue(), index % 3))
    return records


@contextmanager
def _loader(source: Any, batch_size: int, **options: Any) -> Iterator[Loader]:
    order = options.pop("order", None) or Order(size=len(source), batch_size=batch_size, seed=2)
    defaults = {"mean": (0.0,), "std": (1.0,), "rank": 0, "world_size": 1, "threads": 2}
    transform = options.pop("transform", PLAIN)
    loader = Loader(source, order, transform, device=CPU, **(defaults | options))
    try:
        yield loader
    finally:
        loader.close()


def _epoch(loader: Loader, epoch: int = 0) -> list[Batch]:
    return [loader.batch(epoch, step) for step in range(loader.steps)]


def _joined(batches: list[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
    """The real samples of ranks' batches of one step, in rank order."""
    images = torch.cat([batch.images[: batch.count] for batch in batches])
    return images, torch.cat([batch.labels[: batch.count] for batch in batches])


def test_an_epoch_is_the_orders_records_in_their_order() -> None:
    order = Order(size=22, batch_size=5, seed=9)
    with _loader(ListSource(_numbered(22)), 5, order=order) as loader:
        batches = _epoch(loader, epoch=4)
    assert [batch.count for batch in batches] == [5, 5, 5, 5, 2]
    assert [batch.weight for batch in batches] == [1.0] * 5
    labels = torch.cat([batch.labels for batch in batches])
    assert labels.dtype == torch.int64
    assert labels.tolist() == order.epoch_indices(4).tolist()
    images = torch.cat([batch.images for batch in batches])
    assert torch.equal(images, labels.view(-1, 1, 1, 1).expand(-1, 3, 8, 8).float())


def test_images_are_normalised_per_channel() -> None:
    mean, std = (10.0, 128.0, 60.5), (64.0, 2.5, 58.0)
    source = SyntheticSource(6, 8, 3, 10)
    with _loader(
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
    with _loader(
        ListSource(_numbered(4)), 4, transform=transform, channels_last=channels_last
    ) as loader:
        images = loader.batch(0, 0).images
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert images.shape == (4, channels, 8, 8)
    assert images.is_contiguous(memory_format=layout)


def test_padding_is_zero_after_normalisation() -> None:
    white = [Record(np.full((8, 8, 3), 255, np.uint8), 0)] * 40
    transform = Transform(augment="pad", image_size=8)
    with _loader(ListSource(white), 40, transform=transform, mean=(128.0,), std=(128.0,)) as loader:
        values = loader.batch(0, 0).images.unique().tolist()
    assert values == [0.0, pytest.approx(127 / 128)]


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_a_global_batch_is_bit_identical_for_any_world(world_size: int) -> None:
    source = ListSource(_photographs(23))
    with _loader(source, 10, transform=RICH) as loader:
        alone = _epoch(loader, epoch=1)
    shares = []
    for rank in range(world_size):
        with _loader(
            source, 10, transform=RICH, rank=rank, world_size=world_size, threads=1 + rank % 3
        ) as loader:
            shares.append(_epoch(loader, epoch=1))
    for step, whole in enumerate(alone):
        images, labels = _joined([batches[step] for batches in shares])
        assert torch.equal(images, whole.images)
        assert torch.equal(labels, whole.labels)
        assert sum(batches[step].weight for batches in shares) == pytest.approx(1)


@pytest.mark.parametrize(("threads", "prefetch"), [(1, 0), (1, 5), (7, 2)])
def test_a_batch_does_not_depend_on_threads_or_prefetching(threads: int, prefetch: int) -> None:
    source = ListSource(_photographs(12))
    with _loader(source, 5, transform=RICH, threads=3) as loader:
        expected = [*_epoch(loader, 0), *_epoch(loader, 1)]
    with _loader(source, 5, transform=RICH, threads=threads, prefetch=prefetch) as loader:
        found = [*_epoch(loader, 0), *_epoch(loader, 1)]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.images, theirs.images)
        assert torch.equal(ours.labels, theirs.labels)


def test_an_epochs_augmentation_is_another_ones_no_more() -> None:
    with _loader(ListSource(_photographs(4)), 4, transform=RICH) as loader:
        first = {tuple(image.flatten().tolist()) for image in loader.batch(0, 0).images}
        second = {tuple(image.flatten().tolist()) for image in loader.batch(1, 0).images}
    assert not first & second


def test_a_rank_without_samples_borrows_one_that_counts_nothing() -> None:
    source = ListSource(_numbered(12))
    with _loader(source, 10, rank=2, world_size=4) as loader:
        batch = loader.batch(0, 1)  # two samples for four ranks
    assert batch.images.shape == (1, 3, 8, 8)
    assert (batch.count, batch.weight) == (0, 0.0)
    assert (batch.first, batch.last, batch.global_count) == (12, 12, 2)


def test_jumping_back_gives_the_same_batches_again() -> None:
    with _loader(ListSource(_photographs(30)), 4, transform=RICH) as loader:
        first = [loader.batch(3, step) for step in (0, 1, 2, 3)]
        again = [loader.batch(3, step) for step in (1, 2, 0, 3)]
    for step, batch in zip((1, 2, 0, 3), again, strict=True):
        assert torch.equal(batch.images, first[step].images)


def test_another_world_takes_effect_with_the_next_batch() -> None:
    source = ListSource(_photographs(30))
    with _loader(source, 6, transform=RICH) as loader:
        whole = loader.batch(0, 3)
        loader.batch(0, 1)  # and begins the two after it
        loader.reconfigure(1, 2)
        half = loader.batch(0, 3)
    assert (half.first, half.last) == (21, 24)
    assert torch.equal(half.images, whole.images[3:])


def test_the_next_batches_are_made_ahead_and_no_more() -> None:
    read, seen = [], threading.Condition()

    def on_read(index: int) -> None:
        with seen:
            read.append(index)
            seen.notify()

    order = Order(size=6, batch_size=2, shuffle=False)
    with _loader(ListSource(_numbered(6), on_read), 2, order=order, prefetch=2) as loader:
        loader.batch(0, 1)  # asks for step 1, then 2, then the next epoch's first
        with seen:
            assert seen.wait_for(lambda: len(read) == 6, timeout=10)
    assert sorted(read) == [0, 1, 2, 3, 4, 5]


def test_a_damaged_image_is_an_error_of_its_batch_that_names_the_record() -> None:
    records = _numbered(12)
    records[7] = Record(b"\xff\xd8\xff nothing", 0)
    order = Order(size=12, batch_size=3, shuffle=False)
    with _loader(ListSource(records), 3, order=order) as loader:
        assert loader.batch(0, 1).count == 3
        for _ in range(2):
            with pytest.raises(DataError, match="record 7 can't be decoded"):
                loader.batch(0, 2)
        assert loader.batch(0, 3).labels.tolist() == [9, 10, 11]


@pytest.mark.parametrize("label", [-1, 10])
def test_a_label_out_of_range_is_an_error_that_names_record_label_and_rule(label: int) -> None:
    records = [Record(np.zeros((8, 8, 3), np.uint8), 9)] * 5
    records[3] = Record(records[0].image, label)
    with (
        _loader(ListSource(records), 5, num_labels=10) as loader,
        pytest.raises(DataError, match=f"record 3 has the label {label}.* 0 to 9: "),
    ):
        loader.batch(0, 0)


def test_any_error_of_a_source_comes_to_the_caller() -> None:
    def fail(index: int) -> None:
        raise DataError(f"key {index} is gone")

    with (
        _loader(ListSource(_numbered(4), fail), 2) as loader,
        pytest.raises(DataError, match=r"key \d is gone"),
    ):
        loader.batch(0, 0)


def test_a_source_that_hangs_is_an_error_within_the_limit() -> None:
    go_on = threading.Event()
    source = ListSource(_numbered(8), lambda index: go_on.wait(30))
    with _loader(source, 4, timeout=0.05) as loader:
        with pytest.raises(DataError, match=r"epoch 0, step 0 wasn't read within 0\.05 s"):
            loader.batch(0, 0)
        go_on.set()


def test_closing_ends_the_threads() -> None:
    before = set(threading.enumerate())
    with _loader(SyntheticSource(400, 8, 3, 10), 100, threads=3) as loader:
        loader.batch(0, 0)
        threads = set(threading.enumerate()) - before
        assert 1 <= len(threads) <= 3
        assert all(thread.name.startswith("paceline-decode") for thread in threads)
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

    with _loader(ListSource(_numbered(100), on_read), 100, threads=1, timeout=0.01) as loader:
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
    reading, go_on = threading.Event(), threading.Event()

    def on_read(index: int) -> None:
        reading.set()
        go_on.wait(60)

    start = time.monotonic()
    with _loader(ListSource(_numbered(8), on_read), 8, timeout=0.01) as loader:
        with pytest.raises(DataError):
            loader.batch(0, 0)
        assert reading.wait(10)
    assert time.monotonic() - start < 5  # so that Ctrl-C ends a run in time
    go_on.set()


def test_pixels_of_a_batch_do_not_change_under_a_caller_that_keeps_it() -> None:
    with _loader(ListSource(_photographs(20)), 2, transform=RICH) as loader:
        kept: list[tuple[Batch, Pixels]] = []
        for step in range(loader.steps):
            batch = loader.batch(0, step)
            kept.append((batch, batch.images.numpy().copy()))
    for batch, pixels in kept:
        assert np.array_equal(batch.images.numpy(), pixels)
