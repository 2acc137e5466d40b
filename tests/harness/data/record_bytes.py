"""Protobuf's wire format by hand, and records with the field numbers of both formats.

What another program would write, after caffe2.proto and caffe.proto: nothing here uses the package
or a protobuf library.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FLOAT, INT32, BYTE, STRING, UINT8, INT64 = 1, 2, 3, 4, 6, 10

Array = npt.NDArray[np.uint8]


def varint(value: int) -> bytes:
    value &= 2**64 - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def blob(field: int, value: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(value)) + value


def packed_ints(field: int, values: Sequence[int]) -> bytes:
    return blob(field, b"".join(varint(value) for value in values))


def packed_floats(field: int, values: Sequence[float]) -> bytes:
    return blob(field, struct.pack(f"<{len(values)}f", *values))


def single_floats(field: int, values: Sequence[float]) -> bytes:
    return b"".join(varint(field << 3 | 5) + struct.pack("<f", value) for value in values)


def tensorprotos(*tensors: bytes) -> bytes:
    return b"".join(blob(1, tensor) for tensor in tensors)


def dims(*sizes: int) -> bytes:
    return b"".join(number(1, size) for size in sizes)


def int_label(label: int) -> bytes:
    return dims(1) + number(2, INT32) + packed_ints(4, [label])


def raw_tensorprotos(rgb: Array, label: int) -> bytes:
    image = dims(*rgb.shape) + number(2, BYTE) + blob(5, bgr_rows(rgb))
    return tensorprotos(image, int_label(label))


def encoded_tensorprotos(file: bytes, label: int) -> bytes:
    return tensorprotos(number(2, STRING) + blob(6, file), int_label(label))


def raw_datum(planes: Array, label: int) -> bytes:
    channels, height, width = planes.shape
    shape = number(1, channels) + number(2, height) + number(3, width)
    return shape + blob(4, planes.tobytes()) + number(5, label)


def bgr_rows(rgb: Array) -> bytes:
    """Write pixels as Caffe2 does: row by row, each pixel blue, green, red."""
    return bytes(int(value) for row in rgb for r, g, b in row for value in (b, g, r))


def bgr_planes(rgb: Array) -> Array:
    """Write pixels as Caffe does: the plane of blue, then green, then red."""
    red, green, blue = rgb.transpose(2, 0, 1)
    return np.stack([blue, green, red])
