"""Files of images: is it one, is it whole, and what of it goes into a database.

A file is what its content shows. JPEG is checked by simplejpeg, at an eighth of its size, which
reads all of its bytes at half the cost of decoding; Pillow does everything else. Alpha channels
are dropped and EXIF's orientation is ignored, as Caffe's tools do.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
from PIL import Image, UnidentifiedImageError

from paceline.config.db import Encoding
from paceline.data.image.jpeg import is_jpeg, jpeg_pixels, jpeg_size
from paceline.data.source import Pixels

# What Pillow may take a file for: the formats of photographs, not documents or icons.
_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
_GREY_MODES = ("1", "L", "LA")
_COLOUR_MODES = ("RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB")
_QUALITY = 95


class DamagedImage(Exception):
    """An image can't be decoded; the text is the reason."""


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """Kind ("jpeg", "png", … or "raw") and size in pixels of an image."""

    encoding: str
    width: int
    height: int


def is_image(data: bytes, name: str) -> bool:
    """Whether a file's content is an image, or should be by its name."""
    if is_jpeg(data) or name.lower().endswith(_SUFFIXES):
        return True
    try:
        Image.open(io.BytesIO(data), formats=_FORMATS).close()
    except UnidentifiedImageError:
        return False
    return True


def check_image(image: bytes | Pixels) -> ImageFacts:
    """Decode an image as far as it takes to know that it is whole.

    Raises:
        DamagedImage: it isn't.
    """
    if not isinstance(image, bytes):
        return ImageFacts("raw", image.shape[1], image.shape[0])
    try:
        if is_jpeg(image):
            jpeg_pixels(image, colorspace="GRAY", min_height=1, min_width=1)
            return ImageFacts("jpeg", *jpeg_size(image))
        with _opened(image) as opened:
            opened.load()
            return ImageFacts(str(opened.format).lower(), opened.width, opened.height)
    except Exception as error:  # Pillow's and simplejpeg's decoders raise whatever comes
        raise _damaged(error) from error


def stored_form(
    image: bytes | Pixels, encoding: Encoding, resize: int | None = None
) -> bytes | Pixels:
    """Turn an image into what a record holds.

    Args:
        image: a file's bytes, or pixels of shape (height, width, 1 | 3).
        encoding: "jpeg", "png", or "raw" for pixels.
        resize: the short side in pixels to scale to, up or down; None leaves the size.

    Returns:
        The same bytes where they already are that, else an encoded file, or pixels of shape
        (height, width, 1 | 3).

    Raises:
        DamagedImage: the file isn't a whole image, or of a kind that has no 8-bit form.
    """
    if not isinstance(image, bytes):
        return _encoded(_resized(_of_pixels(image), resize), encoding)
    if resize is None and encoding == "jpeg" and is_jpeg(image):
        check_image(image)
        return image
    try:
        with _opened(image) as opened:
            if _is_stored_form(opened, encoding, resize):
                check_image(image)
                return image
            if resize is not None:
                opened.draft(None, (2 * resize, 2 * resize))  # big JPEGs decode at 1/2, 1/4, 1/8
            stored = _resized(_eight_bit(opened), resize)
    except DamagedImage:
        raise
    except Exception as error:  # Pillow's decoders raise whatever comes
        raise _damaged(error) from error
    return _encoded(stored, encoding)


def _opened(data: bytes) -> Image.Image:
    with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
        image.verify()  # PNG's checksums, which decoding ignores; it spoils the image for more
    return Image.open(io.BytesIO(data), formats=_FORMATS)


def _is_stored_form(image: Image.Image, encoding: Encoding, resize: int | None) -> bool:
    if resize is not None and min(image.size) != resize:
        return False
    if encoding == "png":
        return image.format == "PNG" and image.mode in ("L", "RGB")
    return encoding == "jpeg" and image.format in ("JPEG", "MPO")


def _of_pixels(pixels: Pixels) -> Image.Image:
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def _eight_bit(image: Image.Image) -> Image.Image:
    """Convert to grey ("L") or "RGB"."""
    if image.mode.startswith("I"):  # 16 bits: Pillow would clip to 255 instead of scaling
        grey = np.asarray(image).astype(np.int64) >> 8
        return Image.fromarray(np.clip(grey, 0, 255).astype(np.uint8))
    if image.mode in ("P", "PA"):  # Pillow warns of transparency unless it has a place to go
        image = image.convert("RGBA")
    if image.mode in _GREY_MODES:
        return image.convert("L")
    if image.mode in _COLOUR_MODES:
        return image.convert("RGB")
    raise DamagedImage(f"its pixels are of Pillow's kind {image.mode}, which has no 8-bit form")


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


def _damaged(error: Exception) -> DamagedImage:
    return DamagedImage(str(error).rstrip(".") or type(error).__name__)
