"""The files that make a database: is it one, of which kind, and is it still the same?

A *stamp* is equal for copies and different after any change:

    LMDB      the first 128 KiB of data.mdb: both of its meta pages (of whatever page size), of
              which every committed transaction writes one with a new number
    LevelDB   CURRENT and the MANIFEST that it names, and names and sizes of all tables and logs;
              whoever opens a LevelDB directly makes a new MANIFEST, a write makes a log grow

No times and no inode numbers: `cp` and `rsync` change those.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Literal

from paceline.errors import ConfigError, DataError

Kind = Literal["lmdb", "leveldb"]

LMDB_DATA = "data.mdb"
LEVELDB_CURRENT = "CURRENT"

_MARKER: dict[Kind, str] = {"lmdb": LMDB_DATA, "leveldb": LEVELDB_CURRENT}
_LARGEST_PAGE = 64 * 1024  # bytes; LMDB's pages are the operating system's


def require_database(folder: Path, kind: Kind) -> None:
    """Check that a folder holds a database of the given kind that can be read.

    Raises:
        ConfigError: it doesn't; says what is there instead.
    """
    try:
        if not folder.exists():
            raise ConfigError(f"{folder}: there is no such folder; check the path.")
        if not folder.is_dir():
            raise ConfigError(f"{folder} is a file; a database is a folder, give its path.")
        (folder / _MARKER[kind]).open("rb").close()
    except FileNotFoundError as error:
        for other, marker in _MARKER.items():
            if (folder / marker).exists():
                raise ConfigError(
                    f"{folder} is no {kind} database but a {other} one; give --db_type {other}."
                ) from error
        markers = " nor ".join(f"{marker} ({name})" for name, marker in _MARKER.items())
        raise ConfigError(
            f"{folder} is no database: it has neither {markers}; check the path."
        ) from error
    except PermissionError as error:
        raise ConfigError(
            f"{folder}: you may not read it; ask its owner for permission to read."
        ) from error


def stamp(folder: Path) -> str:
    """Stamp the database in `folder`.

    Raises:
        DataError: its files are incomplete or can't be read.
    """
    digest = hashlib.sha256()
    try:
        if (folder / LMDB_DATA).exists():
            with (folder / LMDB_DATA).open("rb") as data:
                digest.update(data.read(2 * _LARGEST_PAGE))
            return f"lmdb-{digest.hexdigest()}"
        for path in (folder / LEVELDB_CURRENT, leveldb_manifest(folder)):
            digest.update(path.read_bytes())
        for path in leveldb_files(folder, ".ldb", ".sst", ".log"):
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    except OSError as error:
        raise DataError(
            f"{error.filename}: {error.strerror}; the database is incomplete, copy it again."
        ) from error
    return f"leveldb-{digest.hexdigest()}"


def leveldb_manifest(folder: Path) -> Path:
    """Find the MANIFEST that a LevelDB's CURRENT names.

    Raises:
        DataError: it names none.
    """
    name = (folder / LEVELDB_CURRENT).read_bytes().removesuffix(b"\n")
    if not re.fullmatch(rb"MANIFEST-\d+", name):
        raise DataError(
            f"{folder / LEVELDB_CURRENT} names no MANIFEST; the database is damaged, copy it again."
        )
    return folder / name.decode()


def leveldb_files(folder: Path, *suffixes: str) -> list[Path]:
    """List a LevelDB's files with the given suffixes, by name."""
    return sorted(path for path in folder.iterdir() if path.suffix in suffixes)
