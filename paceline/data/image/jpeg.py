"""JPEG by libjpeg-turbo (simplejpeg), and which of its complaints make a file a damaged one.

A file that ends early or whose coding is broken is damaged, although the decoder can go on with
grey pixels. What does no harm to pixels, like some bytes too many between two markers, is not: data
sets that everybody uses have such files.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import simplejpeg
from PIL import ExifTags

from paceline.data.image.formats import MAGIC_OF_JPEG, open_image
from paceline.data.source import Pixels

START_OF_SCAN = 0xDA  # kind of the segment that the coded pixels follow
_APPLICATION_1 = 0xE1
_BEGIN = b"\xff\xd8"
_MARK = 0xFF
_EXIF = b"Exif\0\0"
_SEGMENT = struct.Struct(">BBH")  # mark, kind, length with its own two bytes
_HEADERS = 1 << 16  # bytes, at the beginning of an odd file, in which EXIF data are looked for
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


def jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield a file's segments up to the coded pixels: kind, begin and end of the content.

    What isn't a segment is the end too, so that the last one is `START_OF_SCAN` or the file is odd.
    """
    at = len(_BEGIN)
    while at + _SEGMENT.size <= len(data):
        mark, kind, length = _SEGMENT.unpack_from(data, at)
        if mark != _MARK:
            return
        end = at + 2 + length
        yield kind, at + _SEGMENT.size, end
        if kind == START_OF_SCAN:
            return
        at = end


def jpeg_orientation(data: bytes) -> int:
    """Read EXIF's orientation, 1 (upright) to 8; damaged EXIF data and other values are 1."""
    if not _has_exif(data):
        return 1
    try:
        value = int(open_image(data).getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # Pillow raises a dozen kinds over damage
        return 1
    return value if value in range(1, 9) else 1


def _has_exif(data: bytes) -> bool:
    """Return whether there are EXIF data; a search in the whole of a file would take longer."""
    kind = 0
    for kind, begin, _ in jpeg_segments(data):
        if kind == _APPLICATION_1 and data.startswith(_EXIF, begin):
            return True
    return kind != START_OF_SCAN and data.find(_EXIF, 0, _HEADERS) >= 0


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
