"""Colour jitter: brightness, contrast and saturation of an image, in one linear map.

With factors b, c and s, a pixel x, its grey value g(x) and the image's mean grey value m:

    brightness   x -> b x
    contrast     x -> c x + (1 - c) m
    saturation   x -> s x + (1 - s) g(x)

applied in this order and, unlike one after the other on bytes, clipped to 0..255 once, at the end.
The three operations are those of Pillow's ImageEnhance and torchvision's ColorJitter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from paceline.data.source import Pixels

_GREY = (0.299, 0.587, 0.114)  # ITU-R BT.601, as in JPEG's luminance and Pillow's mode L


@dataclass(frozen=True, slots=True, kw_only=True)
class Jitter:
    """Colour jitter factors of brightness, contrast and saturation; 1 is neutral."""

    brightness: float
    contrast: float
    saturation: float


def draw_jitter(strength: float, numbers: Sequence[float]) -> Jitter:
    """Draw three factors, each uniform in [1 - strength, 1 + strength), from [0, 1)."""
    brightness, contrast, saturation = (1 + strength * (2 * number - 1) for number in numbers)
    return Jitter(brightness=brightness, contrast=contrast, saturation=saturation)


def jittered(pixels: Pixels, jitter: Jitter) -> Pixels:
    """Change an image's colours; a grey image has no saturation to change.

    Args:
        pixels: shape (height, width, channels), channels 1 (grey) or 3 (RGB).
        jitter: the three factors.

    Returns:
        Pixels of the same shape.
    """
    gain = jitter.brightness * jitter.contrast
    grey_share = (1 - jitter.contrast) * jitter.brightness
    if pixels.shape[2] == 1:
        table = gain * np.arange(256) + grey_share * float(pixels.mean())
        grey: Pixels = np.clip(np.rint(table), 0, 255).astype(np.uint8)[pixels]
        return grey
    image = Image.fromarray(pixels)
    offset = grey_share * float(np.asarray(image.convert("L")).mean())
    matrix = _matrix(gain, jitter.saturation, offset)
    return np.asarray(image.convert("RGB", matrix))


def _matrix(gain: float, saturation: float, offset: float) -> tuple[float, ...]:
    """List the map as Pillow takes it: for each colour three weights and an offset."""
    matrix: list[float] = []
    for color in range(3):
        for source, grey in enumerate(_GREY):
            matrix.append(gain * (saturation * (source == color) + (1 - saturation) * grey))
        matrix.append(offset)  # grey: saturation leaves it as it is
    return tuple(matrix)
