"""The table of image formats, as stored in a record or read from a file: first bytes and suffixes.

A new format that Pillow decodes needs a line of `FORMATS` and nothing else. Formats that are known
and not decoded: `paceline.data.image.unread_formats`.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, NamedTuple

from PIL import Image

from paceline.data.image.deep_pixels import ValueRange, depth_of, eight_bit_grey
from paceline.data.image.image_errors import DamagedImage, UnreadImage
from paceline.data.image.unread_formats import unread_by_content

MAX_PIXELS = 2**27  # of an image: 384 MiB in RGB


class ImageFormat(NamedTuple):
    """Image format, and how its files are recognized.

    Attributes:
        magic: byte strings; a file of this format begins with one of them.
        suffixes: file-name suffixes; the name of a file of this format ends with one of them.
    """

    magic: tuple[bytes, ...]
    suffixes: tuple[str, ...]


# By Pillow's names: the formats of photographs, not of documents or icons.
FORMATS = {
    "JPEG": ImageFormat((b"\xff\xd8\xff",), (".jpg", ".jpeg")),
    "PNG": ImageFormat((b"\x89PNG\r\n\x1a\n",), (".png",)),
    "BMP": ImageFormat((b"BM",), (".bmp",)),
    "GIF": ImageFormat((b"GIF87a", b"GIF89a"), (".gif",)),
    "PPM": ImageFormat((b"P1", b"P2", b"P3", b"P4", b"P5", b"P6"), (".ppm", ".pgm")),
    "TIFF": ImageFormat((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"), (".tif", ".tiff")),
    "WEBP": ImageFormat((b"RIFF",), (".webp",)),
}
MAGIC_OF_JPEG = FORMATS["JPEG"].magic
MAGIC_OF_TIFF = FORMATS["TIFF"].magic
MAGIC_OF_JPEG_OR_PNG = (*FORMATS["JPEG"].magic, *FORMATS["PNG"].magic)
IMAGE_MAGIC = tuple(magic for known in FORMATS.values() for magic in known.magic)
IMAGE_SUFFIXES = tuple(suffix for known in FORMATS.values() for suffix in known.suffixes)
_MODES = {
    **dict.fromkeys(("1", "L", "LA"), "L"),
    **dict.fromkeys(("RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB"), "RGB"),
}
_SUBFILE_TYPE = 254  # tags of a TIFF
_DNG_VERSION = 50706
_THUMBNAIL = 1  # a bit of the former: the picture is a smaller version of another one


def open_image(data: bytes) -> Image.Image:
    """Read an image's header by Pillow, which decodes the pixels later.

    Raises:
        UnreadImage: it is of a known format that isn't decoded.
        DamagedImage: it is of no known format, its header is damaged, or it is too large.
    """
    if (kind := unread_by_content(data)) is not None:
        raise unread_kind(kind)
    name = next((name for name, known in FORMATS.items() if data.startswith(known.magic)), None)
    if name is None:
        raise DamagedImage("it is not an image of a known format")
    if name not in Image.OPEN:
        Image.init()
    try:
        # Not Image.open, which warns of a large image by a bare line on standard error.
        image = Image.OPEN[name][0](io.BytesIO(data), "")
    except Exception as error:  # Pillow's decoders raise a dozen kinds over damage
        raise DamagedImage(f"its {name} header can't be read ({reason_of(error)})") from error
    if name == "TIFF" and _is_camera_raw(image):
        raise unread_kind("camera raw")
    check_size(*image.size)
    return image


def unread_kind(kind: str) -> UnreadImage:
    """Return the error of an image of a known kind that isn't decoded."""
    return UnreadImage(
        f"it is an image of the kind {kind}, which isn't decoded",
        remedy="Convert it to JPEG or PNG",
    )


def check_size(width: int, height: int) -> None:
    """Refuse an image whose pixels would take too much memory.

    Raises:
        DamagedImage: it is too large.
    """
    if width * height > MAX_PIXELS:
        raise DamagedImage(
            f"it has {width:,} × {height:,} pixels, but the limit is {MAX_PIXELS:,} in all; scale "
            "it down"
        )


def eight_bit(
    image: Image.Image, mode: str | None = None, value_range: ValueRange | None = None
) -> Image.Image:
    """Convert an image to 8 bits; transparency is dropped, as in Caffe.

    Args:
        image: an image as it was opened.
        mode: "L" (grey) or "RGB"; None keeps grey and colour apart.
        value_range: the values of black and white in grey images of more than 8 bits; None: 0 and
            what the format states.

    Raises:
        UnreadImage: the format doesn't state which value is white, and `value_range` is None.
        DamagedImage: its pixels have no 8-bit form.
    """
    depth = depth_of(image)
    if depth is not None and depth.grey:
        image = eight_bit_grey(image, depth, value_range)
    if image.mode in ("P", "PA"):  # some versions of Pillow warn of a palette's transparency
        image = image.convert("RGBA")
    if image.mode not in _MODES:
        raise DamagedImage(f"its pixels are of Pillow's kind {image.mode}, which has no 8-bit form")
    return image.convert(mode or _MODES[image.mode])


def reason_of(error: Exception) -> str:
    """Return what a decoder says of damage, without a full stop."""
    return str(error).rstrip(".") or type(error).__name__


def _is_camera_raw(image: Image.Image) -> bool:
    """Return whether a TIFF is a camera's, whose first picture is a thumbnail of the real one."""
    tags: Mapping[int, Any] = image.tag_v2  # type: ignore[attr-defined]
    return _DNG_VERSION in tags or bool(tags.get(_SUBFILE_TYPE, 0) & _THUMBNAIL)
