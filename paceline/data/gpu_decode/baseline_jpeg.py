"""Which files a GPU decodes: baseline JPEG, grey or YCbCr, of 8 bits, that ends where it should.

Every other file is decoded on the CPU, which also names what is damaged: a file without its end, a
damaged header, a size beyond the limit. What is allowed here is a list of what is known to be
harmless, so that an unforeseen kind of file goes to the CPU.
"""

from __future__ import annotations

import struct

from paceline.data.image.formats import MAX_PIXELS
from paceline.data.image.jpeg import jpeg_segments

_BEGIN = b"\xff\xd8"
_END = b"\xff\xd9"
_BASELINE = 0xC0
_ADOBE = 0xEE
# Tables of codes and quantisation, restart interval, comment, applications' data.
_HARMLESS = frozenset((0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)))


def baseline_size(data: bytes) -> tuple[int, int] | None:
    """Read (width, height) of a file that a GPU decodes; None for any other."""
    if not (data.startswith(_BEGIN) and data.endswith(_END)):
        return None
    for kind, begin, end in jpeg_segments(data):
        if kind == _BASELINE:
            return _frame_size(data[begin:end])
        # Adobe's transform 0: the colours are RGB or CMYK as they are.
        other_colors = (
            kind == _ADOBE
            and data.startswith(b"Adobe", begin)
            and data[begin + 11 : end].startswith(b"\0")
        )
        if kind not in _HARMLESS or other_colors:
            return None
    return None


def _frame_size(frame: bytes) -> tuple[int, int] | None:
    """Read the size in the header of a baseline frame, where its colours are grey or YCbCr."""
    if len(frame) < 9:
        return None
    bits, height, width, components, first_id = struct.unpack_from(">BHHBB", frame)
    known = bits == 8 and components in (1, 3) and first_id != ord("R")
    return (width, height) if known and 0 < width * height <= MAX_PIXELS else None
