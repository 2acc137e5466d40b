"""The two record formats, TensorProtos (Caffe2) and Datum (Caffe): detected, decoded, encoded.

A protobuf parser is no judge of formats: it takes a Datum for a TensorProtos with unknown fields
and the other way round. But the two differ where they overlap, in the wire type of field 1 (a
message there, a number here), so a record is what its *required part* shows: `protos` of a
TensorProtos, `data` or `float_data` of a Datum; both or neither is no record of ours. This is the
place where other readers silently made black images; here every doubt is an error with a key.

    stored                                           → Record
    an encoded file (JPEG, PNG, …)                     the same bytes
    TensorProtos pixels, height × width [× BGR]        uint8 (height, width, 1 | 3), RGB
    Datum pixels, channels (BGR) × height × width      uint8 (height, width, 1 | 3), RGB
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError

from paceline.config.db import RecordFormat
from paceline.data.db.formats.message_fields import (
    UnfitRecord,
    datum_message,
    record_of_datum,
    record_of_tensorprotos,
    tensorprotos_message,
)
from paceline.data.db.formats.messages import Datum, TensorProtos
from paceline.data.source import Pixels, Record
from paceline.errors import DataError


def decode_record(
    value: bytes, key: bytes, expected: RecordFormat | None = None
) -> tuple[Record, RecordFormat]:
    """Read a database's value as a record, in the format that the value itself shows.

    Args:
        value: the stored bytes.
        key: names the record in errors.
        expected: the format of the database's other records, where known.

    Raises:
        DataError: the record is damaged, of neither format, or not of the expected one.
    """
    try:
        return parse_record(value, expected)
    except UnfitRecord as error:
        raise DataError(f"record {printable(key)}: {error}") from error


def parse_record(value: bytes, expected: RecordFormat | None = None) -> tuple[Record, RecordFormat]:
    """Read a value as `decode_record` does, for a caller who names the record.

    Raises:
        UnfitRecord: the record is damaged, of neither format, or not of the expected one.
    """
    message, found = _parse(value)
    record = record_of_datum(message) if found == "datum" else record_of_tensorprotos(message)
    if expected is not None and found != expected:
        raise UnfitRecord(
            f"it is a {_NAMES[found]} in a database of {_NAMES[expected]} records, and a database "
            "has one format: write it again from one source."
        )
    return record, found


def encode_record(image: bytes | Pixels, label: int, record_format: RecordFormat) -> bytes:
    """Write a record in a format; see `encode_tensorprotos` and `encode_datum`."""
    encode = encode_datum if record_format == "datum" else encode_tensorprotos
    return encode(image, label)


def encode_tensorprotos(image: bytes | Pixels, label: int) -> bytes:
    """Write a TensorProtos record.

    Args:
        image: an encoded file, or pixels in RGB (height, width, 3) or grey (height, width, 1).
        label: the class, 0-based.
    """
    return bytes(tensorprotos_message(image, label).SerializeToString())


def encode_datum(image: bytes | Pixels, label: int) -> bytes:
    """Write a Datum record.

    Args:
        image: an encoded file, or pixels in RGB (height, width, 3) or grey (height, width, 1).
        label: the class, 0-based.
    """
    return bytes(datum_message(image, label).SerializeToString())


def printable(key: bytes) -> str:
    """Quote a key for a message: ASCII, escaped, and not longer than a line."""
    text = key.decode("ascii", "backslashreplace")
    shown = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    return f'"{shown[:100]}…"' if len(shown) > 100 else f'"{shown}"'


_NAMES: dict[RecordFormat, str] = {"tensorprotos": "TensorProtos", "datum": "Datum"}


def _parse(value: bytes) -> tuple[Any, RecordFormat]:
    tensors, datum = TensorProtos(), Datum()
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
            f"its {len(value)} bytes are neither a TensorProtos nor a Datum record; it is damaged "
            "or not of an image database: write it again."
        )
    return (tensors, "tensorprotos") if is_tensors else (datum, "datum")
