"""Records from a minidb, Caffe2's own database: one file of records, one after another.

    [int32 key length][int32 value length][key][value] [int32 key length] …      little-endian

It has no header, no order and no way to a key but from the beginning. So the file is walked once,
from length to length, and the index holds where each record begins. Reads are `pread`s, from any
number of threads and processes: nothing is written, and a file that shrinks meanwhile is an error
and not the end of the process, as it would be with mapped memory.

Records are numbered in the order of their keys, as in the other databases; those of equal keys in
the file's.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from paceline.data.db.database_files import minidb_file
from paceline.data.db.formats.record_formats import printable
from paceline.data.db.index.index_file import Index
from paceline.data.db.index.key_list import KeyList
from paceline.errors import DataError

LENGTHS = struct.Struct("<ii")  # of a record's key and value


class MiniDb:
    """Minidb database, read from one file that stays open."""

    def __init__(self, path: Path) -> None:
        self._path = minidb_file(path)
        self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, key: bytes, offset: int | None) -> bytes | None:
        assert offset is not None, "a minidb's index says where its records are"
        head = self._pread(LENGTHS.size + len(key), offset)
        if len(head) < LENGTHS.size:
            return None
        key_bytes, value_bytes = LENGTHS.unpack_from(head)
        if key_bytes != len(key) or head[LENGTHS.size :] != key:
            return None
        value = self._pread(value_bytes, offset + len(head))
        if len(value) < value_bytes:
            raise DataError(
                f"{self._path}: record {printable(key)} at byte {offset} ends too early: the file "
                "was truncated, copy it again."
            )
        return value

    def listing(self) -> Index:
        try:
            records = sorted(self._walk())  # (key, offset)
        except OSError as error:
            raise DataError(
                f"{self._path} can't be read ({error.strerror}): its disk or network failed, "
                "copy it again."
            ) from error
        return Index(
            keys=KeyList.of(key for key, _ in records),
            offsets=np.array([offset for _, offset in records], dtype=np.int64),
        )

    def close(self) -> None:
        os.close(self._file)

    def _walk(self) -> Iterator[tuple[bytes, int]]:
        """Yield each record's key and where the record begins, in the file's order."""
        with open(self._path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            offset = 0
            while head := file.read(LENGTHS.size):
                key_bytes, value_bytes = LENGTHS.unpack(head.ljust(LENGTHS.size, b"\0"))
                end = offset + LENGTHS.size + key_bytes + value_bytes
                if len(head) < LENGTHS.size or end > size:
                    raise DataError(
                        f"{self._path} breaks off in the record at byte {offset}: the copy is "
                        "incomplete (or this is not a minidb); copy it again."
                    )
                if key_bytes <= 0 or value_bytes <= 0:
                    raise DataError(
                        f"{self._path} is damaged at byte {offset}, or not a minidb: the lengths "
                        f"there (key {key_bytes}, value {value_bytes}) must be at least 1; copy it "
                        "again."
                    )
                yield file.read(key_bytes), offset
                file.seek(value_bytes, os.SEEK_CUR)
                offset = end

    def _pread(self, count: int, offset: int) -> bytes:
        try:
            return os.pread(self._file, count, offset)
        except OSError as error:
            raise DataError(
                f"{self._path} can't be read at byte {offset} ({error.strerror}): its disk or "
                "network failed, copy it again."
            ) from error
