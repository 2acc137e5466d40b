"""JPEG by libjpeg-turbo (simplejpeg), and which of its complaints make a file a damaged one.

A file that ends early or whose coding is broken is damaged, although the decoder can go on with
grey pixels. What does no harm to pixels, like some bytes too many between two markers, is not: data
sets that everybody uses have such files.
"""

from __future__ import annotations

import numpy as np
import simplejpeg
from PIL import ExifTags

from paceline.data.image.formats import MAGIC_OF_JPEG, open_image
from paceline.data.source import Pixels

_HEADERS = 1 << 16  # bytes, at a file's beginning, where EXIF data stand
_HARMLESS = ("extraneous bytes", "SOS parameters", "Adobe color transform", "JFIF revision")


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Read (width, height) in the header; None for what Pillow decodes: other inks, and damage."""
    if not data.startswith(MAGIC_OF_JPEG):
        return None
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data, strict=False)
    except (ValueError, KeyError):  # KeyError: a ratio of colour to light that it has no name for
        return None
    return None if colorspace in ("CMYK", "YCCK") else (width, height)


def jpeg_orientation(data: bytes) -> int:
    """Read EXIF's orientation, 1 (upright) to 8; damaged EXIF data and other values are 1."""
    if data.find(b"Exif\0\0", 0, _HEADERS) < 0:
        return 1
    try:
        value = int(open_image(data).getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # Pillow raises a dozen kinds over damage
        return 1
    return value if value in range(1, 9) else 1


def jpeg_pixels(
    data: bytes,
    *,
    colorspace: str,
    min_height: int,
    min_width: int,
    min_factor: int = 1,
    fastupsample: bool = False,
) -> Pixels:
    """Decode, scaled down as `simplejpeg.decode_jpeg` does with the same arguments.

    Returns:
        Pixels of shape (height, width, channels).

    Raises:
        ValueError: the file is damaged; the text is the decoder's.
        OSError: the same.
    """
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(
            data,
            colorspace=colorspace,
            min_height=min_height,
            min_width=min_width,
            min_factor=min_factor,
            fastupsample=fastupsample,
        )
    except ValueError as complaint:
        if not any(words in str(complaint) for words in _HARMLESS):
            raise
        # simplejpeg's own `strict=False` still refuses what it finds in a file's header.
        image = open_image(data).convert("L" if colorspace == "GRAY" else colorspace)
        pixels = np.asarray(image.reduce(min_factor))
    return pixels.reshape(*pixels.shape[:2], -1)
