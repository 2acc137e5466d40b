"""Colour jitter against Pillow's own enhancers, one after the other."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from paceline.data.image.color_jitter import Jitter, draw_jitter, jittered
from paceline.data.source import Pixels


def _mild_image(channels: int) -> Pixels:
    """Values between 70 and 150, which none of the factors below brings to a limit."""
    return np.random.default_rng(0).integers(70, 150, (40, 50, channels), dtype=np.uint8)


@pytest.mark.parametrize(
    "factors", [(1.3, 1, 1), (0.7, 1, 1), (1, 1.3, 1), (1, 0.5, 1), (1, 1, 1.4), (1, 1, 0)]
)
def test_each_factor_does_what_pillows_enhancer_does(factors: tuple[float, float, float]) -> None:
    brightness, contrast, saturation = factors
    image = Image.fromarray(_mild_image(3))
    image = ImageEnhance.Brightness(image).enhance(brightness)
    image = ImageEnhance.Contrast(image).enhance(contrast)
    image = ImageEnhance.Color(image).enhance(saturation)
    jitter = Jitter(brightness=brightness, contrast=contrast, saturation=saturation)
    difference = jittered(_mild_image(3), jitter).astype(int) - np.asarray(image)
    assert np.abs(difference).max() <= 1


def test_together_they_are_pillows_enhancers_in_turn() -> None:
    image = ImageEnhance.Brightness(Image.fromarray(_mild_image(3))).enhance(1.2)
    image = ImageEnhance.Color(ImageEnhance.Contrast(image).enhance(0.8)).enhance(1.3)
    jitter = Jitter(brightness=1.2, contrast=0.8, saturation=1.3)
    difference = jittered(_mild_image(3), jitter).astype(int) - np.asarray(image)
    assert np.abs(difference).max() <= 3  # Pillow rounds three times


def test_a_grey_image_changes_as_the_same_image_in_rgb() -> None:
    grey = _mild_image(1)
    jitter = Jitter(brightness=1.2, contrast=0.7, saturation=1.4)
    difference = jittered(grey, jitter).astype(int) - jittered(np.repeat(grey, 3, axis=2), jitter)
    assert np.abs(difference).max() <= 1


def test_values_end_at_black_and_white() -> None:
    ramp = np.tile(np.arange(256, dtype=np.uint8)[:, None, None], (1, 4, 3))
    bright = jittered(ramp, Jitter(brightness=2, contrast=1, saturation=1))[:, 0, 0]
    assert bright.tolist() == np.minimum(np.arange(256) * 2, 255).tolist()


def test_factors_are_drawn_around_one() -> None:
    assert draw_jitter(0.4, [0, 0.5, 0.75]) == Jitter(
        brightness=pytest.approx(0.6), contrast=1, saturation=pytest.approx(1.2)
    )
