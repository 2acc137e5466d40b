"""The two record formats, TensorProtos (Caffe2) and Datum (Caffe): detected, decoded, encoded.

A protobuf parser doesn't distinguish the formats: it takes a Datum for a TensorProtos with unknown
fields, and vice versa. But they differ in the wire type of field 1 (a message there, a number
here), so the *required field* decides: `protos` of a TensorProtos, `data` or `float_data` of a
Datum. A value with both or neither is an error.

    TensorProtos   protos[0] the image: STRING, an encoded file in string_data[0]; BYTE or UINT8 in
                   byte_data (or int32_data), or FLOAT: height × width × channels, grey with two
                   dims. protos[1] the label: INT32, INT64 or FLOAT. What follows is not read.
    Datum          an encoded file in data, or channels × height × width in data or float_data.
                   An absent label is 0, as caffe.proto has it.

Both formats store colours as OpenCV does, **BGR**; above this file everything is RGB. Pixels stored
as floating point must lie in 0 to 255: others (features, or images scaled to 0…1) would become
black in uint8.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from paceline.config.db import RecordFormat
from paceline.data.db.formats.messages import (
    BYTE,
    FLOAT,
    INT32,
    INT64,
    STRING,
    UINT8,
    Datum,
    TensorProtos,
)
from paceline.data.db.formats.other_values import name_of
from paceline.data.image.formats import IMAGE_MAGIC, MAGIC_OF_JPEG_OR_PNG
from paceline.data.image.unread_formats import unread_by_content
from paceline.data.source import Pixels, Record

Values = npt.NDArray[Any]

_NAMES: dict[RecordFormat, str] = {"tensorprotos": "TensorProtos", "datum": "Datum"}


class UnfitRecord(ValueError):
    """Error of a record without a usable image or label; its text is the reason."""


def decode_record(
    value: bytes, expected: RecordFormat | None = None
) -> tuple[Record, RecordFormat]:
    """Read a database's value as a record, in the format that the value itself shows.

    Args:
        value: the stored bytes.
        expected: the format of the database's other records, where known.

    Raises:
        UnfitRecord: the record is damaged, of neither format, or not of the expected one.
    """
    try:
        message, found = _parse(value)
        record = _record_of_datum(message) if found == "datum" else _record_of_tensorprotos(message)
    except UnfitRecord as error:
        other = name_of(value)  # digits, too, can be parsed as a Datum
        if other is None:
            raise
        raise UnfitRecord(
            f"it is neither a TensorProtos nor a Datum record but {other}: write the database "
            "again with records alone; if others are sound, `paceline db convert` with "
            "--skip_damaged copies those."
        ) from error
    if expected is not None and found != expected:
        raise UnfitRecord(
            f"it is a {_NAMES[found]} in a database of {_NAMES[expected]} records, but a database "
            "has only one format: create the database again from one source."
        )
    return record, found


def encode_record(image: bytes | Pixels, label: int, record_format: RecordFormat) -> bytes:
    """Write a record.

    Args:
        image: an encoded file, or pixels in RGB (height, width, 3) or grey (height, width, 1).
        label: the class, 0-based.
    """
    message = (_datum if record_format == "datum" else _tensorprotos)(image, label)
    return bytes(message.SerializeToString())


def printable(key: bytes) -> str:
    """Quote a key for a message: what isn't printable UTF-8 escaped, and not longer than a line."""
    text = key.decode("utf-8", "backslashreplace")
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return f'"{shown[:100]}…"' if len(shown) > 100 else f'"{shown}"'


def _parse(value: bytes) -> tuple[Any, RecordFormat]:
    tensors = TensorProtos()
    datum = Datum()
    try:
        tensors.ParseFromString(value)
        is_tensors = bool(tensors.protos)
    except DecodeError:  # a Datum's field 1 is a number: it may break off inside a TensorProto
        is_tensors = False
    try:
        datum.ParseFromString(value)
        is_datum = bool(datum.data or datum.float_data)
    except DecodeError:
        is_datum = False
    if is_tensors == is_datum:
        raise UnfitRecord(
            f"its {len(value)} bytes are neither a TensorProtos nor a Datum record: the record is "
            "damaged, or this is not an image database; create it again."
        )
    return (tensors, "tensorprotos") if is_tensors else (datum, "datum")


def _record_of_tensorprotos(message: Any) -> Record:
    """Take image and label from a TensorProtos message, or raise `UnfitRecord`."""
    if len(message.protos) < 2:
        raise UnfitRecord("it has an image but no label; write the database again with labels.")
    image = message.protos[0]
    label = message.protos[1]
    if image.data_type == STRING:
        return Record(_encoded(b"".join(image.string_data[:1])), _tensor_label(label))
    dims = tuple(image.dims)
    shape = (*dims, 1) if len(dims) == 2 else dims  # grey may leave its one channel out
    if len(shape) != 3:
        raise UnfitRecord(f"its image has dims {dims}; write height, width and channels.")
    pixels = _shaped(_tensor_values(image), shape, channels=shape[2])
    return Record(_swapped(pixels), _tensor_label(label))


def _record_of_datum(message: Any) -> Record:
    """Take image and label from a Datum message, or raise `UnfitRecord`."""
    label = _class_number([message.label])
    data = message.data
    floats = message.float_data
    size = message.channels * message.height * message.width
    # Some writers forget the flag: data that don't fit the dims but begin like one are a file.
    if message.encoded or (data and len(data) != size and data.startswith(MAGIC_OF_JPEG_OR_PNG)):
        return Record(_encoded(data), label)
    values = np.frombuffer(data, np.uint8) if data else _bytes_of(floats)
    planes = (message.channels, message.height, message.width)
    pixels = _shaped(values, planes, channels=message.channels)
    return Record(_swapped(pixels.transpose(1, 2, 0)), label)


def _tensorprotos(image: bytes | Pixels, label: int) -> Any:
    """Make a TensorProtos message of an encoded file or of RGB or grey pixels."""
    message = TensorProtos()
    first = message.protos.add()
    if isinstance(image, bytes):
        first.data_type = STRING
        first.string_data.append(image)
    else:
        stored = _swapped(image)
        first.data_type = BYTE
        first.dims.extend(stored.shape if stored.shape[2] == 3 else stored.shape[:2])
        first.byte_data = stored.tobytes()
    message.protos.add(data_type=INT32, dims=[1], int32_data=[label])
    return message


def _datum(image: bytes | Pixels, label: int) -> Any:
    """Make a Datum message of an encoded file or of RGB or grey pixels."""
    if isinstance(image, bytes):
        return Datum(data=image, label=label, encoded=True)
    planes = _swapped(image).transpose(2, 0, 1)
    channels, height, width = planes.shape
    return Datum(channels=channels, height=height, width=width, data=planes.tobytes(), label=label)


def _encoded(data: bytes) -> bytes:
    kind = unread_by_content(data)
    if kind is not None:
        raise UnfitRecord(
            f"its image is of the kind {kind}, which isn't decoded: create the database again with "
            "JPEG or PNG files."
        )
    if not data.startswith(IMAGE_MAGIC):
        raise UnfitRecord(
            f"it is marked as an encoded image but begins with {data[:8].hex(' ') or 'nothing'}, "
            "which is not an image file; create the database again."
        )
    return data


def _tensor_values(tensor: Any) -> Values:
    if tensor.data_type == FLOAT:
        return _bytes_of(tensor.float_data)
    if tensor.data_type not in (BYTE, UINT8):
        raise UnfitRecord(
            f"its image has data type {tensor.data_type}; write STRING ({STRING}, an encoded "
            f"file), BYTE ({BYTE}), UINT8 ({UINT8}) or FLOAT ({FLOAT})."
        )
    if tensor.byte_data:
        return np.frombuffer(tensor.byte_data, np.uint8)
    return _bytes_of(tensor.int32_data)


def _bytes_of(numbers: Any) -> Values:
    """Turn pixels stored as wider numbers into bytes."""
    values = np.asarray(numbers, dtype=np.float64)
    if values.size and not (values.min() >= 0 and values.max() <= 255):
        raise UnfitRecord("its pixels are not all within 0 to 255; write them in that range.")
    if values.size and values.max() <= 1 and np.any(values % 1):
        raise UnfitRecord("its pixels are scaled to 0 to 1; write them as 0 to 255.")
    return np.rint(values).astype(np.uint8)


def _shaped(values: Values, shape: tuple[int, ...], *, channels: int) -> Pixels:
    """Give `values` the record's own `shape`, once that makes sense."""
    if min(shape) < 1 or channels not in (1, 3) or values.size != math.prod(shape):
        raise UnfitRecord(
            f"it has {values.size} values for the shape {shape} with {channels} channels; it needs "
            "one value per element, in 1 (grey) or 3 (colour) channels: it is damaged, or is not "
            "an image."
        )
    return values.reshape(shape)


def _swapped(pixels: Pixels) -> Pixels:
    """Turn BGR into RGB or RGB into BGR; grey has one channel and stays. (h, w, c) both ways."""
    return pixels[:, :, ::-1].copy()  # writable, too: what torch takes without a warning


def _tensor_label(tensor: Any) -> int:
    kinds = {INT32: tensor.int32_data, INT64: tensor.int64_data, FLOAT: tensor.float_data}
    if tensor.data_type not in kinds:
        raise UnfitRecord(
            f"its label has data type {tensor.data_type}; write INT32 ({INT32}), "
            f"INT64 ({INT64}) or FLOAT ({FLOAT})."
        )
    return _class_number(kinds[tensor.data_type])


def _class_number(values: Any) -> int:
    if len(values) != 1 or not np.isfinite(values[0]) or values[0] < 0 or values[0] % 1:
        shown = ", ".join(f"{value:g}" for value in values[:4]) or "empty"
        raise UnfitRecord(f"its label is {shown}; it must be one whole number, at least 0.")
    return int(values[0])
