"""Which tables of a LevelDB hold its data, and how long they are: read from its MANIFEST.

A folder may have more: tables that a merge was writing when its process ended, which no MANIFEST
names. LevelDB gives their numbers out again, and a new table would be written *through* a link of
that name into the database, so a view must link the live ones alone.

A MANIFEST is a log of edits (LevelDB's doc/log_format.md and db/version_edit.cc):

    file     blocks of 32 KiB; a record's pieces fill them, never split below the header
    piece    checksum (4 bytes), length (2, little-endian), type (whole, first, middle, last)
    edit     fields, each a tag and its values; a number is a varint, a string has its length first

The lengths matter: LevelDB passes over a table that was cut off, with all its records, and says
nothing.

Checksums are left to LevelDB, which reads the same file right after.
"""

from __future__ import annotations

from collections.abc import Iterator

_BLOCK = 32 << 10
_HEADER = 7
_WHOLE = 1
_FIRST = 2
_MIDDLE = 3
_LAST = 4

# A field's values by its tag: n a number, s a string.
_FIELDS = {
    1: "s",  # comparator
    2: "n",  # log number
    3: "n",  # next file number
    4: "n",  # last sequence number
    5: "ns",  # compaction pointer: level, key
    6: "nn",  # deleted table: level, number
    7: "nnnss",  # new table: level, number, size, smallest and largest key
    9: "n",  # number of the log before
}
_DELETED = 6
_NEW = 7


def live_tables(manifest: bytes) -> dict[int, int]:
    """Return the tables that the last version of a database consists of: number to bytes.

    Raises:
        ValueError: this is no MANIFEST.
    """
    live: dict[int, int] = {}
    for record in _records(manifest):
        fields = list(_fields(record))
        gone = {values[1] for tag, values in fields if tag == _DELETED}
        live = {number: size for number, size in live.items() if number not in gone}
        live |= {values[1]: values[2] for tag, values in fields if tag == _NEW}
    return live


def _records(log: bytes) -> Iterator[bytes]:
    """Put the pieces of a log's records together; a torn record at the end is none."""
    record = b""
    for start in range(0, len(log), _BLOCK):
        block = log[start : start + _BLOCK]
        at = 0
        while at + _HEADER <= len(block):
            length = int.from_bytes(block[at + 4 : at + 6], "little")
            kind = block[at + 6]
            piece = block[at + _HEADER : at + _HEADER + length]
            if len(piece) < length or not kind:
                break
            record = piece if kind in (_WHOLE, _FIRST) else record + piece
            if kind in (_WHOLE, _LAST):
                yield record
            at += _HEADER + length


def _fields(edit: bytes) -> Iterator[tuple[int, list[int]]]:
    """Yield each field's tag and numbers; a string is represented by its length."""
    at = 0
    while at < len(edit):
        tag, at = _varint(edit, at)
        if tag not in _FIELDS:
            raise ValueError(f"unknown tag {tag}")
        values = []
        for kind in _FIELDS[tag]:
            value, at = _varint(edit, at)
            values.append(value)
            at += value if kind == "s" else 0
        yield tag, values


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Read a number of seven bits a byte, lowest first; return it and where it ends."""
    value = shift = 0
    while True:
        if at >= len(data):
            raise ValueError("a number is cut off")
        value |= (data[at] & 127) << shift
        more = data[at] > 127
        at += 1
        shift += 7
        if not more:
            return value, at
