"""Records from a LevelDB: any number of processes at once, each through a view of its own.

    process ── plyvel.DB ── view (links and small copies) ──┐
    process ── plyvel.DB ── view (links and small copies) ──┴── the database's tables, only read

See `private_view.py` for what a view holds. Nobody may write to the database meanwhile.
Open after a fork, never before: LevelDB's thread and the view belong to the process that opened.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import plyvel

from paceline.data.db.formats.record_formats import printable
from paceline.data.db.index.index_file import Index
from paceline.data.db.index.key_list import KeyList
from paceline.data.db.leveldb.private_view import LevelDbView
from paceline.errors import DataError

_WRITE_BUFFER = 4 << 20  # bytes, LevelDB's default


class LevelDb:
    """LevelDB database, read through a private working folder.

    Args:
        folder: the database's folder.
        cache_dir: parent of the working folder; None: the system's temporary folder.

    Raises:
        ConfigError: the working folder can't be written.
        DataError: the database is damaged, or the disk has too little room for the working folder.
    """

    def __init__(self, folder: Path, cache_dir: Path | None) -> None:
        self._folder = folder
        self._view = LevelDbView(folder, cache_dir)
        try:
            # Room for all of the log: it becomes one table then, not one each few megabytes.
            room = max(_WRITE_BUFFER, 2 * self._view.log_bytes)
            self._db = plyvel.DB(str(self._view.path), write_buffer_size=room)
        except plyvel.Error as error:
            self._view.close()
            raise DataError(
                f"{folder}: LevelDB can't open it ({_text(error)}); it is damaged, copy it again."
            ) from error
        self._view.fence()

    def read(self, key: bytes, offset: int | None) -> bytes | None:
        try:
            # Checksums find damage; a cache would only keep what isn't read again for an epoch.
            value: bytes | None = self._db.get(key, verify_checksums=True, fill_cache=False)
        except plyvel.Error as error:
            raise DataError(
                f"record {printable(key)} of {self._folder}: LevelDB can't read it "
                f"({_text(error)}); it is damaged, copy the database again."
            ) from error
        return value

    def listing(self) -> Index:
        walk = partial(
            self._db.iterator, include_value=False, verify_checksums=True, fill_cache=False
        )
        try:
            # A walk passes over damaged blocks and reports them at the next key. Behind the last
            # key there is none; but the first step of a walk backward begins at the end.
            with walk(reverse=True) as backward:
                next(backward, None)
            with walk() as keys:
                return Index(keys=KeyList.of(keys))
        except plyvel.Error as error:
            raise DataError(
                f"{self._folder}: its keys can't be listed ({_text(error)}); it is damaged, copy "
                "it again."
            ) from error

    def close(self) -> None:
        self._db.close()
        self._view.close()


def _text(error: plyvel.Error) -> str:
    """What LevelDB says, of which plyvel makes bytes."""
    (said,) = error.args or (b"",)
    return said.decode(errors="replace") if isinstance(said, bytes) else str(said)
