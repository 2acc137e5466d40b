"""An index as a file, sealed with a checksum so that a damaged one is none.

The layout, where a line ends with a line feed and numbers are little-endian:

    line       "paceline.index 1" and the CRC-32 of all that follows
    line       JSON: stamp, format, label names, the number of records, the type of lengths, and
               whether there are offsets
    lengths    of the keys: records × that type
    keys       one after another
    offsets    records × int64, or nothing
    labels     records × int64, or nothing
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.config.db import RecordFormat
from paceline.data.db.index.key_list import KeyList


@dataclass(frozen=True, kw_only=True)
class Index:
    """Index of a database: the keys, labels and format of its records.

    Attributes:
        keys: every record's key, in byte order.
        offsets: int64 of shape (records,), the position of each record in the file; None for
            databases that can look up a key.
        labels: int64 of shape (records,), the records' labels; None if unknown.
        label_names: the classes' names in the order of their labels; None if unknown.
        format: the format of all records; None if unknown.
    """

    keys: KeyList
    offsets: npt.NDArray[np.int64] | None = None
    labels: npt.NDArray[np.int64] | None = None
    label_names: tuple[str, ...] | None = None
    format: RecordFormat | None = None


def pack(index: Index, stamp: str) -> bytes:
    """Serialise an index of the database with the given stamp."""
    lengths = index.keys.lengths
    longest = np.min_scalar_type(int(lengths.max(initial=0)))
    lengths = lengths.astype(longest.newbyteorder("<"))
    header = {
        "stamp": stamp,
        "format": index.format,
        "label_names": index.label_names,
        "records": len(lengths),
        "length_type": lengths.dtype.str,
        "offsets": index.offsets is not None,
    }
    arrays = (lengths.tobytes(), index.keys.blob, _bytes(index.offsets), _bytes(index.labels))
    body = b"".join((json.dumps(header).encode(), b"\n", *arrays))
    return _seal(body) + body


def read_index(path: Path, stamp: str) -> Index | None:
    """Read an index; None if there is none, or it has another stamp, or it is damaged.

    All three have one remedy, and the caller has it: to list the keys again.
    """
    try:
        content = path.read_bytes()
    except OSError:
        return None
    body = content.find(b"\n") + 1
    if content[:body] != _seal(memoryview(content)[body:]):
        return None
    arrays = content.index(b"\n", body) + 1
    header = json.loads(content[body:arrays])
    if header["stamp"] != stamp:
        return None
    records = header["records"]
    names = header["label_names"]
    lengths = np.frombuffer(content, header["length_type"], records, arrays)
    keys = arrays + lengths.nbytes
    offsets = keys + int(lengths.sum(dtype=np.int64))
    labels = offsets + 8 * records * header.get("offsets", False)  # older indexes have none
    return Index(
        keys=KeyList(content[keys:offsets], lengths),
        offsets=_numbers(content, offsets, records) if offsets < labels else None,
        labels=_numbers(content, labels, records) if labels < len(content) else None,
        label_names=None if names is None else tuple(names),
        format=header["format"],
    )


def _seal(body: bytes | memoryview) -> bytes:
    return b"paceline.index 1 %08x\n" % zlib.crc32(body)


def _bytes(numbers: npt.NDArray[np.int64] | None) -> bytes:
    return b"" if numbers is None else numbers.astype("<i8").tobytes()


def _numbers(content: bytes, start: int, count: int) -> npt.NDArray[np.int64]:
    return np.frombuffer(content, "<i8", count, start).astype(np.int64)
