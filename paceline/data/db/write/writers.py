"""Writers of new databases: LMDB, LevelDB and minidb, in the order of their keys.

    put(key, value)   appends a record; its key must sort after all that came before
    finish()          brings everything to the disk, in the form that suits readers
    close()           releases the files, finished or not
    offsets           where each record begins, of a database that can't find a key itself, or None

LMDB's pages are full because keys are appended. LevelDB is compacted, so that reading it starts no
compaction.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import lmdb
import plyvel

from paceline.config.db import DbType
from paceline.data.db.database_files import MINIDB_DATA
from paceline.data.db.minidb_source import LENGTHS

# What the databases raise where a file would raise OSError.
WRITE_ERRORS: tuple[type[Exception], ...] = (OSError, lmdb.Error, plyvel.Error)

LONGEST_KEY = 511  # bytes; LMDB's limit
_MIB = 1 << 20


class LmdbWriter:
    """LMDB writer; the memory map grows with the number of records."""

    offsets = None

    def __init__(self, folder: Path, *, map_size: int = 256 * _MIB) -> None:
        # Nobody else sees the folder yet: no lock file, and one sync at the end.
        self._folder = folder
        self._environment = lmdb.open(str(folder), map_size=map_size, lock=False, sync=False)
        self._map_size = map_size
        self._pending: list[tuple[bytes, bytes]] = []
        self._pending_bytes = 0

    def put(self, key: bytes, value: bytes) -> None:
        self._pending.append((key, value))
        self._pending_bytes += len(value)
        if self._pending_bytes >= 32 * _MIB:
            self._commit()

    def finish(self) -> None:
        self._commit()
        self._environment.sync(True)

    def close(self) -> None:
        self._environment.close()

    def _commit(self) -> None:
        while True:
            try:
                with self._environment.begin(write=True) as transaction:
                    _, added = transaction.cursor().putmulti(self._pending, append=True)
                break
            except lmdb.MapFullError:  # the transaction is undone: once more on a larger map
                self._map_size *= 2
                self._environment.set_mapsize(self._map_size)
            except lmdb.Error as error:  # it calls a write that the disk cut short an I/O error
                if shutil.disk_usage(self._folder).free < self._pending_bytes:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
                raise
        assert added == len(self._pending), "keys must be put in sorted order"
        self._pending.clear()
        self._pending_bytes = 0


class LevelDbWriter:
    """LevelDB writer: no compression, since images are compressed already; compacts at the end."""

    offsets = None

    def __init__(self, folder: Path, *, write_buffer_size: int = 64 * _MIB) -> None:
        self._database = plyvel.DB(
            str(folder),
            create_if_missing=True,
            write_buffer_size=write_buffer_size,
            block_size=64 << 10,
            compression=None,
        )

    def put(self, key: bytes, value: bytes) -> None:
        self._database.put(key, value)

    def finish(self) -> None:
        self._database.compact_range()

    def close(self) -> None:
        self._database.close()


class MiniDbWriter:
    """Minidb writer: writes `data.minidb` in the folder, one record after another."""

    def __init__(self, folder: Path) -> None:
        self.offsets: list[int] = []
        self._file = (folder / MINIDB_DATA).open("xb")
        self._end = 0

    def put(self, key: bytes, value: bytes) -> None:
        self.offsets.append(self._end)
        self._end += self._file.write(LENGTHS.pack(len(key), len(value)) + key + value)

    def finish(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


Writer = LmdbWriter | LevelDbWriter | MiniDbWriter

WRITERS: dict[DbType, Callable[[Path], Writer]] = {
    "lmdb": LmdbWriter,
    "leveldb": LevelDbWriter,
    "minidb": MiniDbWriter,
}
