"""The kinds of databases that can be read, and how one is opened by its path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.config.db import DbType
from paceline.data.db.database_files import kind_of
from paceline.data.db.indexed_source import Database, IndexedSource
from paceline.data.db.leveldb.source import LevelDb
from paceline.data.db.lmdb_source import Lmdb
from paceline.data.db.minidb_source import MiniDb
from paceline.errors import ConfigError

DATABASES: dict[DbType, Callable[[Path, Path | None], Database]] = {
    "lmdb": lambda path, _: Lmdb(path),
    "leveldb": LevelDb,
    "minidb": lambda path, _: MiniDb(path),
}


def open_database(
    path: Path, kind: DbType | None = None, *, cache_dir: Path | None = None
) -> IndexedSource:
    """Open a database, and look at some of its records.

    Args:
        path: the database's folder; of a minidb or an LMDB also its one file.
        kind: what the database must be; None detects it from the files.
        cache_dir: where an index goes that can't be written beside the database, and LevelDB's
            views; without it views go to the system's temporary folder.

    Raises:
        ConfigError: there is no such database, it may not be read, or no view can be written.
        DataError: it is damaged or empty, its records are of no known format, or the disk has too
            little room for a view.
    """
    found = kind_of(path)
    if kind not in (None, found):
        if path.is_file() and found == "minidb":  # what any file is taken for
            raise ConfigError(
                f"{path} is a file, and not one of an LMDB: give the path of the {kind} database, "
                "or --db_type minidb if the file is a minidb."
            )
        raise ConfigError(
            f"{path}: the database type is {found}, not {kind}; give --db_type {found}."
        )
    return IndexedSource(_Database(found, path, cache_dir))


@dataclass(frozen=True)
class _Database:
    """Database that was found, of a known kind."""

    kind: DbType
    path: Path
    cache_dir: Path | None

    def open(self) -> Database:
        return DATABASES[self.kind](self.path, self.cache_dir)
