"""Records from an LMDB: one memory-mapped file, usually in a folder, keys in byte order.

LMDB refuses a second open of one file in one process, so its environments are shared here:

    open a ─┐                              every read is a short transaction of its own,
    open a ─┼─ one environment a file      from any number of threads at once
    open b ─┘  closed with the last user

Nothing is written, not even a lock file: read-only media and network folders work, any number of
processes may read, and no lock of a killed one is left behind. No process may write to the
database meanwhile. Kernel readahead is off, for records are read in random order. An environment
without locks survives a fork, but open after it where you can: LevelDB's doesn't.

Records are those of the main database. Named databases inside of it, which other tools make, are
an error that names them.
"""

from __future__ import annotations

import threading
from pathlib import Path

import lmdb

from paceline.data.db.database_files import lmdb_file
from paceline.data.db.formats.record_formats import printable
from paceline.data.db.index.index_file import Index
from paceline.data.db.index.key_list import KeyList
from paceline.data.db.lmdb_pages import TreePages
from paceline.errors import DataError

_File = tuple[int, int]  # its device and inode


class Lmdb:
    """LMDB database, read through an LMDB environment that the whole process shares.

    Args:
        path: its folder, or its one file.

    Raises:
        DataError: the database is damaged or incomplete.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file, self._environment = _ENVIRONMENTS.acquire(path)
        try:
            self._pages = TreePages(lmdb_file(path), self._environment)
        except DataError:
            self.close()
            raise

    def read(self, key: bytes, offset: int | None) -> bytes | None:
        self._pages.check_leaf(key)
        try:
            with self._environment.begin() as transaction:
                return transaction.get(key)
        except lmdb.Error as error:
            raise DataError(
                f"record {printable(key)} of {self._path}: LMDB can't read it ({error}); it is "
                "damaged, copy the database again."
            ) from error

    def listing(self) -> Index:
        names = self._pages.check_leaves()
        if names:
            shown = ", ".join(map(printable, names[:5])) + (", …" if len(names) > 5 else "")
            raise DataError(
                f"{self._path} contains named databases ({shown}), but records are read from an "
                "LMDB's main, unnamed one: copy the records of one named database into an LMDB of "
                "their own."
            )
        try:
            with self._environment.begin() as transaction:
                return Index(keys=KeyList.of(transaction.cursor().iternext(values=False)))
        except lmdb.Error as error:
            raise DataError(
                f"{self._path}: its keys can't be listed ({error}); it is damaged, copy it again."
            ) from error

    def close(self) -> None:
        _ENVIRONMENTS.release(self._file)


class _Environments:
    """Reference-counted LMDB environments of this process, by file path."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[_File, tuple[lmdb.Environment, int]] = {}  # with the number of users

    def acquire(self, path: Path) -> tuple[_File, lmdb.Environment]:
        """Open the database at `path`, or use it where it is open already."""
        found = lmdb_file(path).stat()
        file = (found.st_dev, found.st_ino)
        with self._lock:
            environment, users = self._open.get(file) or (_open(path, found.st_size), 0)
            self._open[file] = environment, users + 1
            return file, environment

    def release(self, file: _File) -> None:
        """Close an environment with its last user."""
        with self._lock:
            environment, users = self._open.pop(file)
            if users > 1:
                self._open[file] = environment, users - 1
            else:
                environment.close()


# The one piece of state that belongs to the process: LMDB's rule is one of processes.
_ENVIRONMENTS = _Environments()


def _open(path: Path, size: int) -> lmdb.Environment:
    try:
        environment = lmdb.open(
            str(path),
            subdir=path.is_dir(),
            readonly=True,
            lock=False,
            readahead=False,
            create=False,
            max_spare_txns=64,  # threads that read at once without making new transactions
        )
    except lmdb.Error as error:
        raise DataError(
            f"{path}: LMDB can't open it ({error}); it is damaged or not an LMDB "
            "database, copy it again."
        ) from error
    needed = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    if size < needed:  # reading behind the end of a mapped file would kill the process
        environment.close()
        raise DataError(
            f"{lmdb_file(path)} has {size} of {needed} bytes: the copy is incomplete; copy the "
            "database again."
        )
    return environment
