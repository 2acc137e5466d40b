"""From a record's image to a sample's pixels: chooses the decoder, then crops, resizes, mirrors.

    bytes --JPEG--> libjpeg-turbo, at 1/1, 1/2, 1/4 or 1/8 --+
    bytes --other--> Pillow ---------------------------------+--> box --> size² --> slot
    pixels --------------------------------------------------+

The plan comes first and decides how much of the decoding is needed. Where its box is at least two,
four or eight times as large as its result, libjpeg-turbo itself scales by 1/2, 1/4 or 1/8 and skips
most of its work; it pays at no other factor. Where the box shrinks at all, colour that was stored
at half the resolution is doubled rather than interpolated: 3 % faster, and 54 dB from the exact
result once resized (a JPEG of quality 90 is some 40 dB from its original).

An EXIF orientation is applied, as OpenCV did for Caffe2; transparency is dropped, as in Caffe.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from PIL import ImageOps

from paceline.data.image.augment import Box, View
from paceline.data.image.color_jitter import jittered
from paceline.data.image.formats import check_size, eight_bit, open_image, reason_of
from paceline.data.image.image_errors import DamagedImage, UnreadImage
from paceline.data.image.jpeg import jpeg_orientation, jpeg_pixels, jpeg_size
from paceline.data.image.pixels import place, recolored, resized, upright
from paceline.data.source import Pixels
from paceline.errors import DataError

Plan = Callable[[int, int], View]
"""Makes a `View` of an image's width and height."""

Name = Callable[[], str]
"""Makes a record's name, which only an error needs."""

_SCALES = (8, 4, 2)


def decode(image: bytes | Pixels, plan: Plan, out: Pixels, *, fill: Pixels, name: Name) -> None:
    """Write an image's sample into a slot.

    Args:
        image: an encoded file, or pixels of shape (height, width, 1 or 3), grey or RGB.
        plan: says what of it is wanted, once its size is known.
        out: receives the sample, uint8 of shape (size, size, channels), channels 1 or 3.
        fill: the colour of what the image leaves empty, uint8 of shape (channels,).
        name: returns the record's name for errors.

    Raises:
        DataError: the image is damaged or of an unknown format.
    """
    pixels, view, box = _opened(image, plan, out.shape[2], name)
    left, top, right, bottom = box
    pixels = resized(pixels[top:bottom, left:right], view.size)
    if view.jitter is not None:
        pixels = jittered(pixels, view.jitter)
    place(pixels, out, shift=view.shift, flip=view.flip, fill=fill)


def _opened(
    image: bytes | Pixels, plan: Plan, channels: int, name: Name
) -> tuple[Pixels, View, Box]:
    """Find an image's pixels, perhaps scaled down, the plan, and the plan's box in them."""
    if isinstance(image, bytes):
        size = jpeg_size(image)
        if size is not None:
            orientation = jpeg_orientation(image)
            view = plan(*(size if orientation < 5 else size[::-1]))
            # How many times smaller the decoder may make it and lose nothing that is needed.
            spare = _short_side(view.box) // view.size
            factor = next((factor for factor in _SCALES if factor <= spare), 1)
            pixels = _by_turbojpeg(image, size, factor, channels, view, name)
            pixels = upright(pixels, orientation)
            # The box in pixels that were scaled down: the nearest whole ones.
            height, width, _ = pixels.shape
            left, top, right, bottom = ((edge + factor // 2) // factor for edge in view.box)
            return pixels, view, (left, top, min(right, width), min(bottom, height))
        pixels = _by_pillow(image, channels, name)
    elif image.ndim == 3 and image.shape[2] in (1, 3) and image.size:
        pixels = recolored(image, channels)
    else:
        raise DataError(
            f"{name()} has pixels of shape {image.shape}; "
            "they must be (height, width, 1) for grey or (height, width, 3) for RGB."
        )
    view = plan(pixels.shape[1], pixels.shape[0])
    return pixels, view, view.box


def _by_turbojpeg(
    data: bytes, size: tuple[int, int], factor: int, channels: int, view: View, name: Name
) -> Pixels:
    width, height = size
    try:
        check_size(width, height)
        return jpeg_pixels(
            data,
            colorspace="GRAY" if channels == 1 else "RGB",
            # The decoder takes the smallest of its sizes not below these: the factor's.
            min_height=-(-height // factor),
            min_width=-(-width // factor),
            min_factor=factor,
            fastupsample=_short_side(view.box) > view.size,
        )
    except (ValueError, OSError, DamagedImage) as error:
        raise _damaged(name, error) from error


def _by_pillow(data: bytes, channels: int, name: Name) -> Pixels:
    try:
        image = open_image(data)
        ImageOps.exif_transpose(image, in_place=True)
        pixels: Pixels = np.asarray(eight_bit(image, "L" if channels == 1 else "RGB"))
    except Exception as error:  # Pillow's decoders raise a dozen kinds over damage
        raise _damaged(name, error) from error
    return pixels.reshape(*pixels.shape[:2], channels)


def _short_side(box: Box) -> int:
    left, top, right, bottom = box
    return min(right - left, bottom - top)


def _damaged(name: Name, error: Exception) -> DataError:
    remedy = f" {error.remedy}." if isinstance(error, UnreadImage) else ""
    return DataError(f"{name()} can't be decoded: {reason_of(error)}.{remedy}")
