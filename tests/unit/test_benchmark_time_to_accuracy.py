"""The arithmetic of the benchmark of the time to an accuracy, and its batches."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.harness.documents.benchmark_runs import load

ways = load("accuracy_ways")
bench = load("time_to_accuracy")

CURVE = [[10, 30, 40], [20, 30, 44]]  # of two ranks, 100 test images in all
OPTIONS = SimpleNamespace(
    test_images=100, train_images=1000, batch=10, epochs=1, evaluate=20, accuracy=0.6
)


def test_the_accuracy_is_reached_at_the_first_evaluation_that_has_it() -> None:
    assert bench.accuracies(CURVE, OPTIONS) == [0.3, 0.6, 0.84]
    assert bench.steps_to(CURVE, OPTIONS) == 40
    last = SimpleNamespace(**{**vars(OPTIONS), "accuracy": 0.8})
    assert bench.steps_to(CURVE, last) == 50  # of 1000 / (2 * 10) steps in all
    never = SimpleNamespace(**{**vars(OPTIONS), "accuracy": 0.9})
    assert bench.steps_to(CURVE, never) is None


def test_steps_of_a_warm_up_take_their_own_time_and_the_slower_rank_counts() -> None:
    timed = [{"warm_up": 2.0, "step": 0.5}, {"warm_up": 1.0, "step": 0.75}]
    assert bench.seconds_to(timed, 30, 0) == 30 * 0.75
    assert bench.seconds_to(timed, 30, 10) == 10 * 2.0 + 20 * 0.75
    assert bench.seconds_to(timed, 5, 10) == 5 * 2.0


def test_exact_ways_share_a_curve() -> None:
    assert {bench.curve_of(row) for row in ("ddp:1", "ddp:25", "notified", "allreduce")} == {
        "exact"
    }
    assert bench.curve_of("notified-int8") == "notified-int8"
    assert bench.curve_of("powersgd:4") == "powersgd:4"


@pytest.mark.parametrize("row", bench.ROWS)
def test_each_default_row_is_one(row: str) -> None:
    assert bench._row(row) == row


NO_ROWS = ["ddp", "ddp:0", "powersgd:x", "notified:8", "horovod", "average:every=0"]


@pytest.mark.parametrize("row", [*NO_ROWS, "average:5", "average:every=1@0,5@9"])
def test_what_is_no_row_is_refused(row: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        bench._row(row)


def test_a_links_rate_is_in_bits() -> None:
    assert [bench.rate_of(bench._link(link)) for link in ("100mbit", "2.5gbit")] == [1e8, 2.5e9]
    with pytest.raises(argparse.ArgumentTypeError):
        bench._link("loopback")


def training_of(rank: int, folder: Path) -> Any:
    """Make a rank's work on 40 images, each filled with its own number, which is its label too."""
    numbers = np.arange(40)
    images = np.broadcast_to(numbers[:, None, None, None], (40, 3, 32, 32)).astype(np.uint8)
    np.save(folder / "train_images.npy", images)
    np.save(folder / "train_labels.npy", numbers)
    place = {"rank": rank, "ranks": 2, "address": "a", "ranks_by_address": {"a": 2}, "store": ""}
    work = {"model": "resnet20", "data": str(folder), "batch": 5, "epochs": 2, "evaluate": 1}
    more = {"warm_up": 0, "seed": 1, "interface": "lo", "rows": ["none"]}
    return ways.Training(ways.Setting(**place, **work, **more))


def test_the_ranks_batches_are_each_image_once_an_epoch(tmp_path: Path) -> None:
    ranks = [training_of(rank, tmp_path) for rank in range(2)]
    assert ranks[0].steps == 8
    for epoch in range(2):
        seen = []
        for step in range(4 * epoch, 4 * epoch + 4):
            for rank in ranks:
                inputs, labels = rank.batch(step)
                assert inputs.shape == (5, 3, 32, 32)
                assert inputs.is_contiguous(memory_format=torch.channels_last)
                centers = inputs[:, :, 16, 16] * ways.STD[0, :, 0, 0] + ways.MEAN[0, :, 0, 0]
                torch.testing.assert_close(
                    centers, labels[:, None].expand(5, 3).float(), rtol=0, atol=1e-3
                )
                seen += labels.tolist()
        assert sorted(seen) == list(range(40))


def test_a_batch_is_cropped_and_mirrored(tmp_path: Path) -> None:
    training = training_of(0, tmp_path)
    columns = np.tile(np.arange(32, dtype=np.uint8), (40, 3, 32, 1))
    training.images = columns
    inputs, _ = training.batch(0)
    row = inputs[:, 0, 16] * ways.STD[0, 0, 0, 0] + ways.MEAN[0, 0, 0, 0]
    steps = row[:, 12:21].diff(dim=1).round()
    assert {tuple(step) for step in steps.tolist()} == {(1.0,) * 8, (-1.0,) * 8}
    assert len({round(value) for value in row[:, 16].tolist()}) > 1
