"""The kinds of databases that can be read, and a database opened by its path alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from paceline.config.db import DbType
from paceline.data.db.database_files import kind_of
from paceline.data.db.indexed_source import IndexedSource
from paceline.data.db.leveldb.source import LevelDbSource
from paceline.data.db.lmdb_source import LmdbSource
from paceline.data.db.minidb_source import MiniDbSource

DatabaseSource = type[LmdbSource] | type[LevelDbSource] | type[MiniDbSource]

DATABASES: dict[DbType, DatabaseSource] = {
    "lmdb": LmdbSource,
    "leveldb": LevelDbSource,
    "minidb": MiniDbSource,
}


@contextmanager
def opened(path: Path, cache_dir: Path | None) -> Iterator[IndexedSource]:
    """Open a database of the kind that its files show, and close it after the block.

    Args:
        path: the database.
        cache_dir: where an index goes that can't be written beside it.

    Raises:
        ConfigError: there is no database, or it may not be read.
        DataError: it can't be read at all, or its records are of no known format.
    """
    with closing(DATABASES[kind_of(path)](path, cache_dir=cache_dir)) as source:
        yield source
