"""Databases as another program writes them: by the databases' own libraries, records by hand.

Tests that run over every kind of database take the fixtures `engine`, `cache` and `folder`, which
`tests/contract/conftest.py` hands out.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import lmdb
import numpy as np
import plyvel
import pytest

from paceline.config.db import DbType
from paceline.data.db.indexed_source import IndexedSource
from paceline.data.db.open_database import open_database
from tests.harness.data.record_bytes import bgr_planes, raw_datum

RECORDS = 40


def write_lmdb(folder: Path, items: Sequence[tuple[bytes, bytes]]) -> None:
    environment = lmdb.open(str(folder), map_size=1 << 26)
    with closing(environment), environment.begin(write=True) as transaction:
        for key, value in items:
            transaction.put(key, value)


def write_leveldb(folder: Path, items: Sequence[tuple[bytes, bytes]]) -> None:
    with plyvel.DB(str(folder), create_if_missing=True) as database:
        for key, value in items:
            database.put(key, value)


def write_minidb(folder: Path, items: Sequence[tuple[bytes, bytes]]) -> None:
    """Append records as Caffe2's minidb.cc does."""
    folder.mkdir(exist_ok=True)
    with (folder / "data.minidb").open("ab") as file:
        for key, value in items:
            file.write(struct.pack("<i", len(key)) + struct.pack("<i", len(value)) + key + value)


@dataclass(frozen=True)
class Engine:
    """A kind of database.

    Attributes:
        marker: the file that shows a folder to be one.
        other: another kind.
    """

    name: DbType
    marker: str
    other: str
    write: Callable[[Path, Sequence[tuple[bytes, bytes]]], None]

    def source(self, path: Path, *, cache_dir: Path | None = None) -> IndexedSource:
        """Open a database that must be of this kind."""
        return open_database(path, self.name, cache_dir=cache_dir)


ENGINES = {
    "lmdb": Engine("lmdb", "data.mdb", "leveldb", write_lmdb),
    "leveldb": Engine("leveldb", "CURRENT", "minidb", write_leveldb),
    "minidb": Engine("minidb", "data.minidb", "lmdb", write_minidb),
}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    """Each kind of database."""
    return ENGINES[request.param]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A place for indexes and views; not made yet."""
    return tmp_path / "cache"


@pytest.fixture
def folder(engine: Engine, tmp_path: Path) -> Path:
    """A database with the records of `items()`."""
    engine.write(tmp_path / "database", items())
    return tmp_path / "database"


def key(i: int) -> bytes:
    return b"%08d_cat/%d.jpg" % (i, i)


def pixels(i: int) -> np.ndarray:
    return np.random.default_rng(i).integers(0, 256, (4, 5, 3), np.uint8)


def label(i: int) -> int:
    return i * 7 % 10


def items() -> list[tuple[bytes, bytes]]:
    return [(key(i), raw_datum(bgr_planes(pixels(i)), label(i))) for i in range(RECORDS)]


def labels() -> list[int]:
    return [label(i) for i in range(RECORDS)]


def check_records(source: IndexedSource, numbers: Sequence[int] = range(RECORDS)) -> None:
    assert len(source) == RECORDS
    for i in numbers:
        record = source[i]
        assert record.label == label(i)
        assert np.array_equal(record.image, pixels(i))
