"""From decoded pixels to normalised samples: crop, resize, mirror, shift and colour of a batch.

Three launches make a batch, whatever the sizes of its images:

    weigh    table of plans --> for each row and column of a sample, its source pixels' weights
    resize   those          --> uint8 (m, channels, size, size), and each image's sum of grey
    finish   those          --> float32 samples, coloured, mirrored, shifted, normalised

The weights are made in float64, which is slow: once, so that `resize` has only integers. Contrast
needs the mean of the whole resized image before a pixel changes: hence `finish`. `resize` is
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

from paceline.data.gpu_decode.plan import FIELDS, TAPS

# `taps` differ from batch to batch, and no value of them may need a compilation of its own.
jit: Callable[[Callable[..., Any]], Any] = triton.jit(do_not_specialize=["taps"])

_FIELDS = tl.constexpr(FIELDS)
_TILE = tl.constexpr(16)  # rows and columns of all channels that a program of `finish` makes
_PLANE_TILE = tl.constexpr(32)  # rows and columns that a program of `resize` makes, by channel
_PLACES = tl.constexpr(256)  # rows or columns whose weights a program makes
# As on the CPU, no product and sum become one operation; eight warps keep registers few.
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}


def make_samples(plans: Tensor, constants: Tensor, images: Tensor) -> None:
    """Make samples, in three launches on the current stream.

    The weights take 8 · m · size · (1 + taps) bytes, by the most taps of the batch: 25 MB for 256
    images of 224 rows if one's box has 6,000; about a megabyte an image for a box of 65,535.

    Args:
        plans: int64, (m, FIELDS), rows of `plan_of`; in host memory, pinned where the device is
            a GPU.
        constants: float32, (3, channels): scale, offset and fill of each channel; a value in 0..255
            becomes scale · value + offset.
        images: float32, (n, channels, size, size), of any strides; receives the samples at the
            places that the plans name.
    """
    device = images.device
    channels, size = images.shape[1:3]
    taps = int(plans[:, TAPS].max())
    plans = plans.to(device, non_blocking=True)
    # For each image, down and across: first source pixels, and their weights in order.
    weights = torch.empty((len(plans), 2, 1 + taps, size), dtype=torch.int32, device=device)
    resized = torch.empty((len(plans), channels, size, size), dtype=torch.uint8, device=device)
    sums = torch.zeros(len(plans), dtype=torch.int64, device=device)
    shape = {"SIZE": size, "CHANNELS": channels, **OPTIONS}

    grid = len(plans), 2, triton.cdiv(size, _PLACES.value)
    _weigh[grid](plans, weights, taps, SIZE=size, **OPTIONS)
    tiles = triton.cdiv(size, _PLANE_TILE.value)
    grid = len(plans), tiles, tiles
    _resize[grid](plans, weights, taps, resized, sums, **shape)
    tiles = triton.cdiv(size, _TILE.value)
    grid = len(plans), tiles, tiles
    _finish[grid](plans, resized, sums, constants, images, *images.stride(), **shape)


@jit
def _weigh(plans: tl.tensor, weights: tl.tensor, taps: tl.tensor, SIZE: tl.constexpr) -> None:
    """Find the source pixels, and their weights, of an image's rows or columns.

    Each row or column gets the same number of taps, all in the box, so that `_resize` needs no
    mask; those that the filter doesn't cover have a weight of 0.
    """
    image = tl.program_id(0).to(tl.int64)
    axis = tl.program_id(1)
    place = tl.program_id(2) * _PLACES + tl.arange(0, _PLACES)
    inside = place < SIZE
    plan = plans + image * _FIELDS + axis
    length = tl.load(plan + 5)
    one = 1 << tl.load(plan + 7)
    own_taps = tl.load(plan + 9).to(tl.int32)

    scale = length.to(tl.float64) / SIZE
    radius = tl.maximum(scale, 1.0)
    inverse = 1.0 / radius
    center = scale * (tl.minimum(place, SIZE - 1) + 0.5)
    first = tl.maximum((center - radius + 0.5).to(tl.int64), 0)
    end = tl.minimum((center + radius + 0.5).to(tl.int64), length)
    source = tl.minimum(first, length - own_taps)
    total = center * 0.0
    for tap in range(own_taps):
        total += _weight(source + tap, first, end, center, inverse)

    column = weights + (image * 2 + axis) * (1 + taps) * SIZE + place
    tl.store(column, source.to(tl.int32), mask=inside)
    for tap in range(own_taps):
        weight = _weight(source + tap, first, end, center, inverse) / total
        column += SIZE
        tl.store(column, (weight * one + 0.5).to(tl.int32), mask=inside)


@jit
def _weight(
    at: tl.tensor, first: tl.tensor, end: tl.tensor, center: tl.tensor, inverse: tl.tensor
) -> tl.tensor:
    """Weigh a source pixel by the triangle filter."""
    weight = 1.0 - tl.abs((at - center + 0.5) * inverse)
    return tl.where((at >= first) & (at < end), tl.maximum(weight, 0.0), 0.0)


@jit
def _resize(
    plans: tl.tensor,
    weights: tl.tensor,
    taps: tl.tensor,
    resized: tl.tensor,
    sums: tl.tensor,
    SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Resize a tile of an image's box to bytes, and add its grey values to the image's sum."""
    image = tl.program_id(0).to(tl.int64)
    y = tl.program_id(1) * _PLANE_TILE + tl.arange(0, _PLANE_TILE)[:, None]
    x = tl.program_id(2) * _PLANE_TILE + tl.arange(0, _PLANE_TILE)[None, :]
    inside = (y < SIZE) & (x < SIZE)
    plan = plans + image * _FIELDS
    channel_stride = tl.load(plan + 2)
    row_stride = tl.load(plan + 3)
    column_stride = tl.load(plan + 4)
    row_bits = tl.load(plan + 7).to(tl.int32)
    column_bits = tl.load(plan + 8).to(tl.int32)
    row_taps = tl.load(plan + 9).to(tl.int32)
    column_taps = tl.load(plan + 10).to(tl.int32)
    down = weights + image * 2 * (1 + taps) * SIZE + tl.minimum(y, SIZE - 1)
    across = weights + (image * 2 + 1) * (1 + taps) * SIZE + tl.minimum(x, SIZE - 1)
    plane = tl.load(plan + 1).to(tl.pointer_type(tl.uint8))
    plane += tl.load(down) * row_stride + tl.load(across) * column_stride

    nothing = inside.to(tl.int32) * 0
    grey = nothing
    for channel in range(CHANNELS):
        row = plane + channel * channel_stride
        value = nothing
        for row_tap in range(1, 1 + row_taps):
            pixel = row
            along = nothing
            for column_tap in range(1, 1 + column_taps):
                along += tl.load(pixel).to(tl.int32) * tl.load(across + column_tap * SIZE)
                pixel += column_stride
            value += _byte(along, column_bits) * tl.load(down + row_tap * SIZE)
            row += row_stride
        value = _byte(value, row_bits)
        at = ((image * CHANNELS + channel) * SIZE + y) * SIZE + x
        tl.store(resized + at, value.to(tl.uint8), mask=inside)
        if CHANNELS == 1:
            grey = value
        else:  # Pillow's mode L
            grey += value * tl.where(channel == 0, 19595, tl.where(channel == 1, 38470, 7471))
    if CHANNELS > 1:
        grey = (grey + 32768) >> 16
    tl.atomic_add(sums + image, tl.sum(tl.where(inside, grey, 0)).to(tl.int64))


@jit
def _byte(value: tl.tensor, bits: tl.tensor) -> tl.tensor:
    """Round a weighted sum, which isn't negative, to a byte."""
    return tl.minimum((value + (1 << (bits - 1))) >> bits, 255)


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
    image = tl.program_id(0).to(tl.int64)
    y = tl.program_id(1) * _TILE + tl.arange(0, _TILE)[:, None, None]
    x = tl.program_id(2) * _TILE + tl.arange(0, _TILE)[None, :, None]
    channel = tl.arange(0, 1 if CHANNELS == 1 else 4)[None, None, :]
    inside = (y < SIZE) & (x < SIZE) & (channel < CHANNELS)
    plan = plans + image * _FIELDS
    from_y = y - tl.load(plan + 11)
    from_x = x - tl.load(plan + 12)
    covered = inside & (from_y >= 0) & (from_y < SIZE) & (from_x >= 0) & (from_x < SIZE)
    from_x = tl.where(tl.load(plan + 13) != 0, SIZE - 1 - from_x, from_x)
    at = ((image * CHANNELS + channel) * SIZE + from_y) * SIZE + from_x
    value = tl.load(resized + at, mask=covered, other=0).to(tl.float32)

    if CHANNELS > 1:
        saturation = _factor(plan + 15)
        weights = tl.where(channel == 0, 0.299, tl.where(channel == 1, 0.587, 0.114))
        grey = tl.sum(value * weights, axis=2, keep_dims=True)
        value = saturation * value + (1 - saturation) * grey
    mean = tl.load(sums + image).to(tl.float32) / (SIZE * SIZE)
    value = _factor(plan + 14) * value + _factor(plan + 16) * mean
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
