"""The files that make a database: is it one, of which kind, and is it still the same?

    LMDB      a folder with data.mdb, or one file under any name (subdir=False)
    LevelDB   a folder with CURRENT
    minidb    a folder with data.minidb, or that file itself, under any name, as Caffe2 has it

A *stamp* is equal for copies and different after any change:

    LMDB      the first 128 KiB of its file: both of its meta pages (of whatever page size), of
              which every committed transaction writes one with a new number
    LevelDB   CURRENT and the MANIFEST that it names, and names and sizes of all tables and logs;
              a process that opens a LevelDB directly makes a new MANIFEST, a write makes a log grow
    minidb    the size, and the first and last 64 KiB; it has no version numbers, so a change in the
              middle that keeps the size is seen only when the record is read: its key is in both

No times and no inode numbers: `cp` and `rsync` change those.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.config.db import DbType
from paceline.errors import ConfigError, DataError

LMDB_DATA = "data.mdb"
LEVELDB_CURRENT = "CURRENT"
MINIDB_DATA = "data.minidb"

_MARKER: dict[DbType, str] = {
    "lmdb": LMDB_DATA,
    "leveldb": LEVELDB_CURRENT,
    "minidb": MINIDB_DATA,
}
_LEVELDB_SUFFIXES = (".ldb", ".sst", ".log")
_PAGE_HEADER = 16  # bytes, before the magic of an LMDB
_LMDB_MAGIC = struct.pack("=L", 0xBEEFC0DE)
_LARGEST_PAGE = 64 * 1024  # bytes; LMDB's pages are the operating system's
_END = 64 * 1024  # bytes of a minidb's beginning and of its end


def kind_of(path: Path) -> DbType:
    """See of which kind the database at `path` is. A file is an LMDB or else a minidb.

    Raises:
        ConfigError: there is none, or it may not be read.
    """
    try:
        if not path.exists():
            raise ConfigError(f"{path}: there is no such folder or file; check the path.")
        if path.is_file() and path.name in (LMDB_DATA, LEVELDB_CURRENT):
            raise ConfigError(
                f"{path} is one file of a database: give the folder {path.parent} instead."
            )
        if not path.is_dir():
            with path.open("rb") as file:
                file.seek(_PAGE_HEADER)
                return "lmdb" if file.read(len(_LMDB_MAGIC)) == _LMDB_MAGIC else "minidb"
        for kind, marker in _MARKER.items():
            if (path / marker).exists():
                (path / marker).open("rb").close()
                return kind
    except PermissionError as error:
        raise ConfigError(f"{path}: you have no permission to read it; ask its owner.") from error
    markers = ", ".join(f"{marker} ({kind})" for kind, marker in _MARKER.items())
    raise ConfigError(f"{path} is not a database: it has none of {markers}; check the path.")


def beside(database: Path, name: str) -> Path:
    """Name a file of ours that belongs to a database: in its folder, or beside its one file.

    A minidb's file in its folder, DB/data.minidb, is the database DB.
    """
    if not database.is_file():
        return database / name
    return database.with_name(name if database.name == MINIDB_DATA else f"{database.name}.{name}")


def lmdb_file(path: Path) -> Path:
    """Name the one file of an LMDB, given by its folder or by itself."""
    return path / LMDB_DATA if path.is_dir() else path


def minidb_file(path: Path) -> Path:
    """Name the one file of a minidb, given by its folder or by itself."""
    return path / MINIDB_DATA if path.is_dir() else path


def stamp(path: Path) -> str:
    """Stamp the database at `path`.

    Raises:
        ConfigError: there is none.
        DataError: its files are incomplete or can't be read.
    """
    kind = kind_of(path)
    digest = hashlib.sha256()
    try:
        for part in _STAMPED[kind](path):
            digest.update(part)
    except OSError as error:
        raise DataError(
            f"{error.filename}: {error.strerror}; the database is incomplete, copy it again."
        ) from error
    return f"{kind}-{digest.hexdigest()}"


def identity(path: Path) -> list[tuple[int, int, int, int]]:
    """Identify the very files of the database at `path`: also an equal copy is another one.

    Returns:
        Device, inode, size and nanosecond of the last change, of each file with records.

    Raises:
        OSError: it can't be read.
    """
    files = [path]
    if path.is_dir():
        files = [each for each in sorted(path.iterdir()) if _has_records(each)]
    found = map(os.stat, files)
    return [(each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns) for each in found]


def _has_records(file: Path) -> bool:
    return file.name in _MARKER.values() or file.suffix in _LEVELDB_SUFFIXES


def leveldb_manifest(folder: Path) -> Path:
    """Find the MANIFEST that a LevelDB's CURRENT names.

    Raises:
        DataError: it names none.
    """
    name = (folder / LEVELDB_CURRENT).read_bytes().removesuffix(b"\n")
    if not re.fullmatch(rb"MANIFEST-\d+", name):
        raise DataError(
            f"{folder / LEVELDB_CURRENT} doesn't name a MANIFEST file; the database is damaged, "
            "copy it again."
        )
    return folder / name.decode()


def leveldb_files(folder: Path, *suffixes: str) -> list[Path]:
    """List a LevelDB's files with the given suffixes, by name."""
    return sorted(path for path in folder.iterdir() if path.suffix in suffixes)


def _of_lmdb(path: Path) -> Iterator[bytes]:
    with lmdb_file(path).open("rb") as data:
        yield data.read(2 * _LARGEST_PAGE)


def _of_leveldb(folder: Path) -> Iterator[bytes]:
    yield (folder / LEVELDB_CURRENT).read_bytes()
    yield leveldb_manifest(folder).read_bytes()
    for path in leveldb_files(folder, *_LEVELDB_SUFFIXES):
        yield f"{path.name} {path.stat().st_size}\n".encode()


def _of_minidb(path: Path) -> Iterator[bytes]:
    with minidb_file(path).open("rb") as data:
        size = os.fstat(data.fileno()).st_size
        yield f"{size}\n".encode()
        yield data.read(_END)
        data.seek(max(0, size - _END))
        yield data.read(_END)


_STAMPED: dict[DbType, Callable[[Path], Iterator[bytes]]] = {
    "lmdb": _of_lmdb,
    "leveldb": _of_leveldb,
    "minidb": _of_minidb,
}
