"""What the kernel is told of an image: where its box lies in memory, and what is made of it.

A row of the table of plans, int64:

    0 place in the batch     1 address of the box's first pixel   2-4 steps of channel, row, column
    5 6 height, width of the box         7 8 bits of the weights down, across
    9 10 most source pixels of a pixel (taps) down, across         11 12 shift         13 mirror
    14 15 gain, saturation               16 share of the mean grey value; in 2^-32

An EXIF orientation is a matter of address and steps alone: a step back mirrors, swapped steps turn.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from paceline.data.image.augment import View
from paceline.data.image.color_jitter import Jitter
from paceline.data.image.pixels import ORIENTATION_STEPS

FIELDS = 17
TAPS = slice(9, 11)
_NEUTRAL = Jitter(brightness=1, contrast=1, saturation=1)


def plan_of(
    strides: tuple[int, int, int], shape: tuple[int, int], orientation: int, view: View
) -> list[int]:
    """List an image's row of the table, for the place 0 and for pixels that begin at address 0.

    Args:
        strides: steps of channel, row and column, in bytes.
        shape: height and width.
        orientation: EXIF's, 1 to 8.
        view: the plan, in pixels of the upright image.
    """
    channel, row, column = strides
    height, width = shape
    address = 0
    if orientation >= 5:
        row, column = column, row
        height, width = width, height
    down, across = ORIENTATION_STEPS.get(orientation, (1, 1))
    if down < 0:
        address += (height - 1) * row
        row = -row
    if across < 0:
        address += (width - 1) * column
        column = -column
    left, top, right, bottom = view.box
    address += top * row + left * column
    box = bottom - top, right - left
    bits, taps = zip(*(filter_shape(length, view.size) for length in box), strict=True)
    jitter = view.jitter or _NEUTRAL
    gain = jitter.brightness * jitter.contrast
    factors = gain, jitter.saturation, jitter.brightness - gain
    colors = [round(factor * 2**32) for factor in factors]
    steps = channel, row, column
    return [0, address, *steps, *box, *bits, *taps, *view.shift, view.flip, *colors]


@lru_cache(maxsize=1 << 14)
def filter_shape(length: int, size: int) -> tuple[int, int]:
    """Find the binary places of the weights that resize `length` pixels to `size`, and the taps.

    As many places as let torch's largest weight fit into 16 bits (ATen's UpSampleKernel.cpp,
    `_compute_index_ranges_int16_weights`); taps are the most source pixels of a pixel.
    """
    scale = length / size
    radius = max(scale, 1.0)
    centers = scale * (np.arange(size)[:, None] + 0.5)
    first = np.maximum((centers - radius + 0.5).astype(np.int64), 0)
    end = np.minimum((centers + radius + 0.5).astype(np.int64), length)
    at = first + np.arange(2 * math.ceil(radius) + 1)
    weights = np.maximum(1 - np.abs((at - centers + 0.5) / radius), 0) * (at < end)
    largest = float((weights / weights.sum(axis=1, keepdims=True)).max())
    bits = next((bits for bits in range(22) if int(0.5 + largest * (2 << bits)) >= 1 << 15), 22)
    return bits, int((end - first).max())
