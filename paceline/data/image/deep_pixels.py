"""Pixels of more than 8 bits: which of their values is white, and what they are in 8 bits.

    format                          white is                      read by Pillow as
    PNG, PGM, TIFF of 16 bits       65,535 (PGM: its own maximum) I;16 or I
    TIFF of 12 bits                 4,095                         I;16
    TIFF of 32 bits or with sign    not stated                    I, L
    floating point                  not stated                    F
    16-bit colour                   65,535                        RGB …, the higher bytes alone

A value is scaled so that black becomes 0 and white becomes 255; what lies outside is clipped. Black
is 0, unless the caller gives the values of both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from paceline.data.image.image_errors import DamagedImage, UnreadImage

# Tags of a TIFF.
_BITS = 258
_PHOTOMETRIC = 262
_SAMPLE_FORMAT = 339
_UNSIGNED = 1  # a sample format
_SIGNED = 2  # likewise
_WHITE_IS_ZERO = 0  # a photometric interpretation; Pillow regards it in 8 bits only
_SIXTEEN = 65535

ValueRange = tuple[float, float]
"""The values of black and of white."""


class DeepFormat(NamedTuple):
    """Format of pixels with more than 8 bits a channel, or with signed values.

    Attributes:
        kind: what its pixels are, for messages.
        white: the value of white; None if the format doesn't state it.
        grey: whether all bits can be read; Pillow reads the higher bytes of 16-bit colours alone.
    """

    kind: str
    white: int | None
    grey: bool


def depth_of(image: Image.Image) -> DeepFormat | None:
    """Return the depth of an image, as opened; None for one of 8 unsigned bits or fewer.

    Of a loaded image of 16-bit colours nothing is known any more: None, too.
    """
    tags: Any = getattr(image, "tag_v2", {})
    bits = tags.get(_BITS, (16,))[0]
    signed = tags.get(_SAMPLE_FORMAT, (_UNSIGNED,))[0] == _SIGNED
    if image.mode == "F":
        return DeepFormat("floating-point numbers", None, grey=True)
    if signed and image.mode in ("I", "L"):
        return DeepFormat(f"signed {bits}-bit integers", None, grey=True)
    if image.mode.startswith("I"):
        return DeepFormat(f"{bits}-bit integers", 2**bits - 1 if bits <= 16 else None, grey=True)
    return DeepFormat("16-bit colours", _SIXTEEN, grey=False) if _is_deep_colour(image) else None


def value_range_of(image: Image.Image, depth: DeepFormat | None) -> tuple[float, float]:
    """Return the least and the greatest value of an image, with a depth or of 8 bits.

    Raises:
        DamagedImage: a pixel is no number.
    """
    if depth is not None and depth.grey:
        values = _values(image)
        return values.min().item(), values.max().item()
    # Transparency beside a palette is converted with it.
    colours = image.convert("RGBA" if image.mode == "P" else "RGB").getextrema()[:3]
    least = min(channel[0] for channel in colours)  # type: ignore[index]
    greatest = max(channel[1] for channel in colours)  # type: ignore[index]
    return (least, greatest) if depth is None else (least << 8, greatest << 8 | 0xFF)


def eight_bit_grey(
    image: Image.Image, depth: DeepFormat, value_range: ValueRange | None
) -> Image.Image:
    """Scale a grey image that has a depth to 8 bits.

    Args:
        value_range: the values that become 0 and 255; None: 0 and what its format states.

    Raises:
        UnreadImage: the format states nothing.
        DamagedImage: a pixel is no number.
    """
    values = _values(image)
    if value_range is None and depth.white is None:
        raise UnreadImage(
            f"its pixels are {depth.kind}, here {values.min():,} to {values.max():,}, and the file "
            "doesn't state which value is white",
            remedy="Create or convert the database by paceline db with --encoding png "
            "--value_range LOW HIGH, the values of black and white in all images",
        )
    black, white = value_range or (0, depth.white or 0)
    # 256 steps of equal width: of 16 bits the higher byte, as Pillow reads colours.
    levels = np.floor((values.astype(np.float64) - black) * 256 / (white - black)).clip(0, 255)
    if getattr(image, "tag_v2", {}).get(_PHOTOMETRIC) == _WHITE_IS_ZERO:
        levels = 255 - levels
    return Image.fromarray(levels.astype(np.uint8))


def _values(image: Image.Image) -> npt.NDArray[Any]:
    """Read the values of a grey image that has a depth, shape (height, width)."""
    values = np.asarray(image)
    sample_format = getattr(image, "tag_v2", {}).get(_SAMPLE_FORMAT, (_UNSIGNED,))[0]
    if image.mode == "L":
        values = values.view(np.int8)
    elif image.mode == "I" and sample_format == _UNSIGNED:
        values = values.view(np.uint32)
    if not np.isfinite(values).all():
        raise DamagedImage("some of its pixels are NaN or infinite")
    return values


def _is_deep_colour(image: Image.Image) -> bool:
    """Return whether the decoder of an image will read 16 bits of each colour."""
    tiles = getattr(image, "tile", None)
    if not tiles:
        return False
    arguments: Any = tiles[0][3]
    raw_mode, *more = (arguments,) if isinstance(arguments, str) else arguments or ("",)
    of_netpbm = image.format == "PPM" and bool(more) and isinstance(more[0], int) and more[0] > 255
    return (";16" in str(raw_mode) or of_netpbm) and not image.mode.startswith("I")
