"""Makes what turns records into samples of a model: decoding, augmentation, normalisation."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from paceline.config.data import DataConfig
from paceline.data.image.augment import Transform
from paceline.data.sample_maker import SampleMaker
from paceline.data.source import Source


def sample_maker(
    data: DataConfig, source: Source, *, train: bool, seed: int = 0, labelled: bool = True
) -> SampleMaker:
    """Make what reads, augments and decodes records, for training or for evaluation.

    Args:
        data: says what becomes of an image.
        source: the records.
        train: whether samples are augmented at random.
        seed: of what is random.
        labelled: whether the records' labels count.
    """
    mean = data.each_channel(data.image_mean_per_channel)
    return SampleMaker(
        source=source,
        transform=Transform(
            augment=data.augment,
            image_size=data.image_size,
            scale=data.scale,
            channels=data.num_channels,
            color_jitter=data.color_jitter if train else 0.0,
            seed=seed,
            train=train,
        ),
        fill=np.clip(np.rint(mean), 0, 255).astype(np.uint8),
        num_labels=data.num_labels if labelled else None,
    )


def normalisation(data: DataConfig, device: torch.device, *, channels_last: bool) -> dict[str, Any]:
    """Return the arguments of what normalises images on a device: an `Upload`, say."""
    return {
        "mean": data.each_channel(data.image_mean_per_channel),
        "std": data.each_channel(data.image_std_per_channel),
        "device": device,
        "channels_last": channels_last,
    }
