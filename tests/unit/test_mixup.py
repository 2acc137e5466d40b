"""Mixup: pixels, labels and weights of mixed samples, and their loss."""

from __future__ import annotations

from math import gamma
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, one_hot

from paceline.data.image.augment import Transform
from paceline.data.mixup import MixupMaker
from paceline.data.sample_maker import SampleMaker
from paceline.data.source import Record, SourceLost
from paceline.errors import DataError
from paceline.run.mixup import Mixup

SIDE, COUNT, CLASSES = 4, 50, 7
EVERY = np.arange(COUNT)


class Images:
    """Source of random images, of which one may be broken."""

    def __init__(self, broken: int | None = None, error: type[DataError] = DataError) -> None:
        shape = (COUNT, SIDE, SIDE, 3)
        self.pixels = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
        self._broken = broken
        self._error = error

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Record:
        if index == self._broken:
            raise self._error("it is damaged.")
        return Record(image=self.pixels[index], label=index % CLASSES)

    def name(self, index: int) -> str:
        return f"record {index}"


def maker_of(source: Any, alpha: float = 0.4, augment: Any = "none") -> MixupMaker:
    transform = Transform(
        augment=augment, image_size=SIDE, scale=SIDE, channels=3, seed=5, train=True
    )
    fill = np.zeros(3, np.uint8)
    return MixupMaker(
        source=source, transform=transform, fill=fill, num_labels=CLASSES, alpha=alpha
    )


def samples_of(
    maker: MixupMaker, epoch: int = 0
) -> tuple[np.ndarray, list[tuple[int, int, float]]]:
    """Make all samples: pixels, and two labels and a weight each."""
    out = np.zeros((COUNT, maker.sample_bytes), np.uint8)
    labels = []
    for index, numbers in enumerate(maker.numbers(epoch, EVERY)):
        packed = maker.write(index, numbers, out[index])
        labels.append((packed % 2**24, packed // 2**24 % 2**24, (packed // 2**48) / 2**15))
    return out.reshape(COUNT, SIDE, SIDE, 3), labels


def partners(maker: MixupMaker) -> list[int]:
    return [int(row[-2] * COUNT) for row in maker.numbers(0, EVERY)]


def test_images_and_labels_are_mixed_by_one_weight() -> None:
    source = Images()
    maker = maker_of(source)
    pixels, labels = samples_of(maker)
    for index, (partner, (one, other, w)) in enumerate(zip(partners(maker), labels, strict=True)):
        assert (one, other) == (index % CLASSES, partner % CLASSES)
        assert 0 <= w <= 0.5
        expected = (1 - w) * source.pixels[index] + w * source.pixels[partner].astype(float)
        assert np.abs(pixels[index] - expected).max() <= 0.5
    assert len({*partners(maker)}) > COUNT / 2


def test_a_partner_is_augmented_by_random_numbers_of_its_own() -> None:
    maker = maker_of(Images(), augment="pad")
    draws = maker.transform.draws
    shared = {name: getattr(maker, name) for name in ("source", "transform", "fill", "num_labels")}
    plain = SampleMaker(**shared)
    pixels, labels = samples_of(maker)
    own, others = (np.zeros((COUNT, maker.sample_bytes), np.uint8) for _ in range(2))
    for index, numbers in enumerate(maker.numbers(0, EVERY)):
        assert numbers[:draws] != numbers[draws : 2 * draws]
        plain.write(index, numbers[:draws], own[index])
        plain.write(partners(maker)[index], numbers[draws : 2 * draws], others[index])
        w = labels[index][2]
        expected = (1 - w) * own[index] + w * others[index].astype(float)
        assert np.abs(pixels[index].ravel() - expected).max() <= 0.5


def test_a_sample_depends_on_seed_epoch_and_record_alone() -> None:
    maker = maker_of(Images())
    whole = maker.numbers(3, EVERY)
    assert maker.numbers(3, np.array([41, 7])) == [whole[41], whole[7]]
    first, _ = samples_of(maker, 0)
    again, _ = samples_of(maker, 0)
    later, _ = samples_of(maker, 1)
    assert (first == again).all()
    assert (first != later).any()


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_weights_are_drawn_from_the_beta_distribution(alpha: float) -> None:
    """By the mean deviation of Beta(a, a) from 1/2, 2^(-2a) / (a B(a, a))."""
    deviation = 2 ** (-2 * alpha) * gamma(2 * alpha) / (alpha * gamma(alpha) ** 2)
    maker = maker_of(Images(), alpha)
    weights = [w for epoch in range(40) for _, _, w in samples_of(maker, epoch)[1]]
    error = np.std(weights) / len(weights) ** 0.5
    assert np.mean(weights) == pytest.approx(0.5 - deviation, abs=4 * error)


def test_a_sample_whose_partner_cant_be_read_is_not_mixed() -> None:
    broken = partners(maker_of(Images()))[3]
    damaged = maker_of(Images(broken))
    numbers = damaged.numbers(0, EVERY)
    out = np.zeros(damaged.sample_bytes, np.uint8)
    assert damaged.write(3, numbers[3], out) == 3
    assert (out.reshape(SIDE, SIDE, 3) == Images().pixels[3]).all()
    with pytest.raises(DataError, match="it is damaged"):  # in its own turn
        damaged.write(broken, numbers[broken], out)
    with pytest.raises(SourceLost):
        maker_of(Images(broken, SourceLost)).write(3, numbers[3], out)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_that_of_torch_for_soft_targets(smoothing: float) -> None:
    one = torch.tensor([0, 3, 6, 2])
    other = torch.tensor([5, 3, 0, 0])
    weight = torch.tensor([0.25, 0.5, 0.125, 0.0], dtype=torch.float64)
    packed = one + other * 2**24 + (weight * 2**15).long() * 2**48
    logits = torch.randn(4, CLASSES, dtype=torch.float64, generator=torch.manual_seed(1))
    share = weight[:, None]
    targets = (1 - share) * one_hot(one, CLASSES) + share * one_hot(other, CLASSES)
    expected = cross_entropy(logits, targets, label_smoothing=smoothing)
    mixup = Mixup(0.4, smoothing)
    loss = mixup(logits, packed)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-13)
    assert mixup.scored(packed).tolist() == one.tolist()
