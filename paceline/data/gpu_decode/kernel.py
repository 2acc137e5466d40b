"""From decoded pixels to normalised samples: crop, resize, mirror, shift and colour of a batch.

Two launches make a batch, whatever the sizes of its images:

    resize   table of plans --> uint8 (m, size, size, channels), and each image's sum of grey
    finish   those          --> float32 samples, coloured, mirrored, shifted, normalised

Contrast needs the mean of the whole resized image before a pixel changes: hence two. `resize` is
torch's antialiased bilinear `interpolate` of bytes, bit for bit: triangle filter, weights of 16
bits, rows first, rounded to bytes between the passes. Colour is that of `color_jitter.py`, within a
rounding.

Triton is imported here and nowhere else; its interpreter runs the same code on a CPU where
TRITON_INTERPRET is 1 before the import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.data.gpu_decode.plan import FIELDS

jit: Callable[[Callable[..., Any]], Any] = triton.jit

_FIELDS = tl.constexpr(FIELDS)
_TILE = tl.constexpr(16)  # rows and columns that a program makes
# As on the CPU, no product and sum become one operation; eight warps keep registers few.
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}


def make_samples(plans: Tensor, constants: Tensor, images: Tensor) -> None:
    """Make samples, in two launches on the current stream.

    Args:
        plans: int64, (m, FIELDS), rows of `plan_of`.
        constants: float32, (3, channels): scale, offset and fill of each channel; a value in 0..255
            becomes scale · value + offset.
        images: float32, (n, channels, size, size), of any strides; receives the samples at the
            places that the plans name.
    """
    channels, size = images.shape[1:3]
    resized = torch.empty(
        (len(plans), size, size, channels), dtype=torch.uint8, device=images.device
    )
    sums = torch.zeros(len(plans), dtype=torch.int64, device=images.device)
    shape = {"SIZE": size, "CHANNELS": channels, **OPTIONS}
    tiles = triton.cdiv(size, _TILE.value)
    grid = len(plans), tiles, tiles
    _resize[grid](plans, resized, sums, **shape)
    _finish[grid](plans, resized, sums, constants, images, *images.stride(), **shape)


@jit
def _resize(
    plans: tl.tensor,
    resized: tl.tensor,
    sums: tl.tensor,
    SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Resize a tile of an image's box to bytes, and add its grey values to the image's sum."""
    image, y, x, channel, inside = _pixels(SIZE, CHANNELS)
    plan = plans + image * _FIELDS
    source = tl.load(plan + 1).to(tl.pointer_type(tl.uint8)) + channel * tl.load(plan + 2)
    row_stride = tl.load(plan + 3)
    column_stride = tl.load(plan + 4)
    row_bits = tl.load(plan + 7)
    column_bits = tl.load(plan + 8)
    top, bottom, y_center, y_inverse, y_taps, y_total = _filter(y, tl.load(plan + 5), SIZE)
    left, right, x_center, x_inverse, x_taps, x_total = _filter(x, tl.load(plan + 6), SIZE)
    nothing = inside.to(tl.int32) * 0
    value = nothing
    for y_tap in range(y_taps):
        at_y = top + y_tap
        row = source + at_y * row_stride
        in_row = inside & (at_y < bottom)
        along = nothing
        for x_tap in range(x_taps):
            at_x = left + x_tap
            pixel = tl.load(row + at_x * column_stride, mask=in_row & (at_x < right), other=0)
            weight = _weight(at_x, right, x_center, x_inverse) / x_total
            along += pixel.to(tl.int32) * _fixed(weight, column_bits)
        weight = _weight(at_y, bottom, y_center, y_inverse) / y_total
        value += _byte(along, column_bits) * _fixed(weight, row_bits)
    value = tl.where(inside, _byte(value, row_bits), 0)
    at = ((image * SIZE + y) * SIZE + x) * CHANNELS + channel
    tl.store(resized + at, value.to(tl.uint8), mask=inside)
    if CHANNELS == 1:
        grey = value
    else:  # Pillow's mode L
        weights = tl.where(channel == 0, 19595, tl.where(channel == 1, 38470, 7471))
        grey = (tl.sum(value * weights, axis=2) + 32768) >> 16
    tl.atomic_add(sums + image, tl.sum(grey).to(tl.int64))


@jit
def _pixels(SIZE: tl.constexpr, CHANNELS: tl.constexpr) -> tl.tensor:
    """Return this program's image, the coordinates of its tile, and which are in the sample."""
    image = tl.program_id(0).to(tl.int64)
    y = tl.program_id(1) * _TILE + tl.arange(0, _TILE)[:, None, None]
    x = tl.program_id(2) * _TILE + tl.arange(0, _TILE)[None, :, None]
    channel = tl.arange(0, 1 if CHANNELS == 1 else 4)[None, None, :]
    return image, y, x, channel, (y < SIZE) & (x < SIZE) & (channel < CHANNELS)


@jit
def _filter(place: tl.tensor, length: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """Find what a pixel is made of: from, to, centre, 1 / radius, most taps, sum of weights."""
    scale = length.to(tl.float64) / SIZE
    radius = tl.maximum(scale, 1.0)
    center = scale * (tl.minimum(place, SIZE - 1) + 0.5)
    first = tl.maximum((center - radius + 0.5).to(tl.int64), 0)
    end = tl.minimum((center + radius + 0.5).to(tl.int64), length)
    taps = 2 * tl.ceil(radius).to(tl.int32) + 1
    total = center * 0.0
    for tap in range(taps):
        total += _weight(first + tap, end, center, 1.0 / radius)
    return first, end, center, 1.0 / radius, taps, total


@jit
def _weight(at: tl.tensor, end: tl.tensor, center: tl.tensor, inverse: tl.tensor) -> tl.tensor:
    """Weigh a source pixel by the triangle filter."""
    weight = 1.0 - tl.abs((at - center + 0.5) * inverse)
    return tl.where(at < end, tl.maximum(weight, 0.0), 0.0)


@jit
def _fixed(weight: tl.tensor, bits: tl.tensor) -> tl.tensor:
    """Round a weight to a whole multiple of 2^-bits."""
    return (weight * (1 << bits) + 0.5).to(tl.int32)


@jit
def _byte(value: tl.tensor, bits: tl.tensor) -> tl.tensor:
    """Round a weighted sum to a byte."""
    rounded = (value + (1 << (bits - 1)).to(tl.int32)) >> bits.to(tl.int32)
    return tl.minimum(tl.maximum(rounded, 0), 255)


@jit
def _finish(
    plans: tl.tensor,
    resized: tl.tensor,
    sums: tl.tensor,
    constants: tl.tensor,
    images: tl.tensor,
    image_stride: tl.tensor,
    channel_stride: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Colour, mirror, shift and normalise a tile of a sample."""
    image, y, x, channel, inside = _pixels(SIZE, CHANNELS)
    plan = plans + image * _FIELDS
    from_y = y - tl.load(plan + 9)
    from_x = x - tl.load(plan + 10)
    covered = inside & (from_y >= 0) & (from_y < SIZE) & (from_x >= 0) & (from_x < SIZE)
    from_x = tl.where(tl.load(plan + 11) != 0, SIZE - 1 - from_x, from_x)
    at = ((image * SIZE + from_y) * SIZE + from_x) * CHANNELS + channel
    value = tl.load(resized + at, mask=covered, other=0).to(tl.float32)

    if CHANNELS > 1:
        saturation = _factor(plan + 13)
        weights = tl.where(channel == 0, 0.299, tl.where(channel == 1, 0.587, 0.114))
        grey = tl.sum(value * weights, axis=2, keep_dims=True)
        value = saturation * value + (1 - saturation) * grey
    mean = tl.load(sums + image).to(tl.float32) / (SIZE * SIZE)
    value = _factor(plan + 12) * value + _factor(plan + 14) * mean
    value = tl.floor(tl.minimum(tl.maximum(value, 0.0), 255.0) + 0.5)

    constant = constants + tl.minimum(channel, CHANNELS - 1)
    value = tl.where(covered, value, tl.load(constant + 2 * CHANNELS))
    value = value * tl.load(constant) + tl.load(constant + CHANNELS)
    images += tl.load(plan) * image_stride + channel * channel_stride
    tl.store(images + y * row_stride + x * column_stride, value, mask=inside)


@jit
def _factor(place: tl.tensor) -> tl.tensor:
    """Load a factor, in units of 2^-32."""
    return tl.load(place).to(tl.float32) * (1.0 / 4294967296.0)
