"""Image files: which files are images, which are damaged, and what a record stores of them.

A file is what its content shows. JPEG is checked by simplejpeg, at an eighth of its size, which
reads all bytes at half the cost of decoding; Pillow does everything else. A JPEG or PNG that is
stored as it is keeps its EXIF orientation, which decoding applies; an image that is encoded anew is
turned upright. Transparency is dropped, as Caffe's tools do, and more than 8 bits a channel are
scaled to 8; `StoredForm` reports both.
"""

from __future__ import annotations

import io
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps

from paceline.config.db import Encoding
from paceline.data.image.deep_pixels import DeepFormat, ValueRange, depth_of, value_range_of
from paceline.data.image.formats import (
    IMAGE_MAGIC,
    IMAGE_SUFFIXES,
    MAGIC_OF_JPEG,
    MAGIC_OF_TIFF,
    check_size,
    eight_bit,
    open_image,
    reason_of,
    unread_kind,
)
from paceline.data.image.image_errors import DamagedImage, UnreadImage
from paceline.data.image.jpeg import jpeg_pixels, jpeg_size
from paceline.data.image.unread_formats import unread_by_name
from paceline.data.source import Pixels

_QUALITY = 95


class StoredForm(NamedTuple):
    """What a record stores of an image, and what of the image that leaves out.

    Attributes:
        image: an encoded file, or pixels of shape (height, width, 1 | 3).
        transparent: whether the image had transparent pixels, even in part. Their colours are read
            as opaque, whether or not the bytes are kept.
        depth: what its pixels were, where they had more than 8 bits; else None.
        values: their least and greatest value; None of a JPEG that is stored as it is.
        frames: the number of its frames or pages, of which the first is read.
    """

    image: bytes | Pixels
    transparent: bool = False
    depth: DeepFormat | None = None
    values: tuple[float, float] | None = None
    frames: int = 1


def is_image(data: bytes, name: str) -> bool:
    """Return whether a file's content is an image, or should be by its name."""
    if data.startswith(MAGIC_OF_JPEG) or named_as_image(name):
        return True
    try:
        open_image(data)
    except UnreadImage:
        return True
    except DamagedImage:
        return False
    return True


def named_as_image(name: str) -> bool:
    """Return whether a file should be an image by its name, of whatever kind."""
    return name.lower().endswith(IMAGE_SUFFIXES) or unread_by_name(name) is not None


def check_readable(data: bytes, name: str) -> None:
    """Refuse a file whose name promises an image that isn't decoded, unless its content is another.

    Raises:
        UnreadImage: it is one. A camera's raw file may have a TIFF's content.
    """
    kind = unread_by_name(name)
    if kind is None or (data.startswith(IMAGE_MAGIC) and not data.startswith(MAGIC_OF_TIFF)):
        return
    raise unread_kind(kind)


def check_image(image: bytes | Pixels) -> tuple[str, tuple[int, int]]:
    """Decode an image as far as it takes to know that it is undamaged.

    Returns:
        Its kind ("jpeg", "png", … or "raw"), and its (width, height) in pixels.

    Raises:
        DamagedImage: it is damaged or too large.
    """
    if not isinstance(image, bytes):
        return "raw", (image.shape[1], image.shape[0])
    try:
        if image.startswith(MAGIC_OF_JPEG):
            size = jpeg_size(image) or open_image(image).size
            check_size(*size)
            jpeg_pixels(image, colorspace="GRAY", min_height=1, min_width=1)
            return "jpeg", size
        opened = _opened(image)
        eight_bit(opened)
        return str(opened.format).lower(), opened.size
    except DamagedImage:
        raise
    except Exception as error:  # Pillow's and simplejpeg's decoders raise a dozen kinds
        raise DamagedImage(reason_of(error)) from error


def stored_form(
    image: bytes | Pixels,
    encoding: Encoding,
    resize: int | None = None,
    value_range: ValueRange | None = None,
) -> StoredForm:
    """Make of an image what a record stores: the same bytes where they are in that form already.

    Args:
        image: a file's bytes, or pixels of shape (height, width, 1 | 3).
        encoding: "jpeg", "png", or "raw" for pixels.
        resize: the short side in pixels to scale to, up or down; None leaves the size.
        value_range: the values of black and white in grey images of more than 8 bits; None: 0 and
            what their format states.

    Raises:
        UnreadImage: the file is of a kind that isn't decoded, or its format doesn't state which
            value is white.
        DamagedImage: the file is damaged, too large, or of a kind that has no 8-bit form.
    """
    if not isinstance(image, bytes):
        pixels = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
        return StoredForm(_encoded(_resized(pixels, resize), encoding))
    if resize is None and encoding == "jpeg" and image.startswith(MAGIC_OF_JPEG):
        check_image(image)
        return StoredForm(image)
    try:
        opened = _opened(image)
        depth = depth_of(opened)
        values = value_range_of(opened, depth)
        # The further images of a JPEG are previews, and the other picture of a stereo camera.
        frames = 1 if opened.format in ("JPEG", "MPO") else getattr(opened, "n_frames", 1)
        transparent = False
        if opened.has_transparency_data:
            least, _ = opened.convert("RGBA").getchannel("A").getextrema()
            transparent = least != 255
        if _is_stored_form(opened, encoding, resize):
            check_image(image)
            return StoredForm(image, transparent, depth, values, frames)
        if resize is not None:
            opened.draft(None, (2 * resize, 2 * resize))  # big JPEGs decode at 1/2, 1/4, 1/8
        ImageOps.exif_transpose(opened, in_place=True)
        eight = _resized(eight_bit(opened, value_range=value_range), resize)
        return StoredForm(_encoded(eight, encoding), transparent, depth, values, frames)
    except DamagedImage:
        raise
    except Exception as error:  # Pillow's decoders raise a dozen kinds
        raise DamagedImage(reason_of(error)) from error


def _opened(data: bytes) -> Image.Image:
    open_image(data).verify()  # PNG's checksums, which decoding ignores; nothing else can follow
    return open_image(data)


def _is_stored_form(image: Image.Image, encoding: Encoding, resize: int | None) -> bool:
    if resize is not None and min(image.size) != resize:
        return False
    if encoding == "png":
        return image.format == "PNG" and image.mode in ("L", "RGB")
    return encoding == "jpeg" and image.format in ("JPEG", "MPO")


def _resized(image: Image.Image, resize: int | None) -> Image.Image:
    if resize is None or min(image.size) == resize:
        return image
    scale = resize / min(image.size)
    width, height = (max(resize, round(side * scale)) for side in image.size)
    return image.resize((width, height), Image.Resampling.BILINEAR)


def _encoded(image: Image.Image, encoding: Encoding) -> bytes | Pixels:
    if encoding == "raw":
        pixels = np.asarray(image, dtype=np.uint8)
        return pixels.reshape(*pixels.shape[:2], -1)
    file = io.BytesIO()
    image.save(file, encoding, quality=_QUALITY)
    return file.getvalue()
