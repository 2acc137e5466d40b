"""Databases as other programs find them: read here with LMDB and LevelDB themselves."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import lmdb
import plyvel
import pytest

from paceline.data.db.write.writers import LevelDbWriter, LmdbWriter, Writer


def items(count: int, size: int) -> list[tuple[bytes, bytes]]:
    noise = random.Random(0)
    return [(b"%08d_x" % i, noise.randbytes(size)) for i in range(count)]


def write(writer: Writer, records: list[tuple[bytes, bytes]]) -> None:
    with closing(writer):
        for key, value in records:
            writer.put(key, value)
        writer.finish()


def lmdb_items(folder: Path) -> Iterator[tuple[bytes, bytes]]:
    with lmdb.open(str(folder), readonly=True, lock=False) as env, env.begin() as transaction:
        yield from transaction.cursor()


def tables(folder: Path) -> dict[str, int]:
    return {p.name: p.stat().st_size for p in folder.glob("*.ldb")}


def test_an_lmdb_grows_beyond_its_first_map(tmp_path: Path) -> None:
    records = items(200, 5000)
    write(LmdbWriter(tmp_path, map_size=64 << 10), records)
    assert list(lmdb_items(tmp_path)) == records


def test_an_lmdb_grows_by_its_own_size_in_one_commit(tmp_path: Path) -> None:
    records = items(3, 20 << 20)  # more than a commit's worth, each record larger than the map
    write(LmdbWriter(tmp_path, map_size=1 << 20), records)
    assert list(lmdb_items(tmp_path)) == records


def test_keys_that_are_not_sorted_are_our_bug(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="sorted"):
        write(LmdbWriter(tmp_path), [(b"b", b"1"), (b"a", b"2")])


def test_reading_a_finished_leveldb_makes_no_new_tables(tmp_path: Path) -> None:
    records = items(600, 20_000)  # 12 MB over 1 MB buffers: several levels' worth of tables
    write(LevelDbWriter(tmp_path, write_buffer_size=1 << 20), records)
    before = tables(tmp_path)
    assert len(before) > 3
    order = random.Random(1).sample(records, len(records))
    with closing(plyvel.DB(str(tmp_path))) as database:
        for _ in range(3):
            for key, value in order:
                assert database.get(key) == value
    assert tables(tmp_path) == before
