"""What every source over a database must do, for LMDB and LevelDB alike."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import plyvel
import pytest

from paceline.errors import ConfigError, DataError
from tests.harness.databases import (
    ENGINES,
    RECORDS,
    Engine,
    check_records,
    items,
    key,
    label,
    pixels,
    read_only,
)
from tests.harness.wire import bgr_planes, raw_datum, raw_tensorprotos


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    return ENGINES[request.param]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def folder(engine: Engine, tmp_path: Path) -> Path:
    folder = tmp_path / "database"
    engine.write(folder, items())
    return folder


# -- reading --


def test_records_are_numbered_in_the_order_of_their_keys(engine, tmp_path, cache):
    shuffled = [items()[i] for i in np.random.default_rng(0).permutation(RECORDS)]
    engine.write(tmp_path / "database", shuffled)
    with closing(engine.source(tmp_path / "database", cache_dir=cache)) as source:
        check_records(source)
        assert source.format == "datum"


def test_there_is_no_record_beyond_the_last(engine, folder, cache):
    with closing(engine.source(folder, cache_dir=cache)) as source:
        for i in (RECORDS, -1):
            with pytest.raises(IndexError):
                source[i]


def test_many_threads_read_the_same_records(engine, folder, cache):
    orders = [np.random.default_rng(seed).permutation(RECORDS) for seed in range(16)]
    with closing(engine.source(folder, cache_dir=cache)) as source, ThreadPoolExecutor(16) as pool:
        for done in [pool.submit(check_records, source, order.tolist()) for order in orders]:
            done.result()


def test_one_database_opens_several_times_in_one_process(engine, folder, cache, tmp_path):
    (tmp_path / "alias").symlink_to(folder)
    with closing(engine.source(folder, cache_dir=cache)) as first:
        with closing(engine.source(tmp_path / "alias", cache_dir=cache)) as second:
            check_records(second)
            check_records(first)
        check_records(first)
    with closing(engine.source(folder, cache_dir=cache)) as third:
        check_records(third)


def test_both_databases_have_the_same_fingerprint_and_other_data_another(tmp_path, cache):
    changed = items()
    changed[RECORDS - 1] = (key(RECORDS - 1), raw_datum(bgr_planes(pixels(0)), 0))
    variants = {"same": items(), "fewer": items()[:-1], "changed": changed}
    seen: dict[str, set[str]] = {name: set() for name in variants}
    for engine in ENGINES.values():
        for name, content in variants.items():
            path = tmp_path / f"{engine.name}-{name}"
            engine.write(path, content)
            with closing(engine.source(path, cache_dir=cache)) as source:
                seen[name].add(source.fingerprint)
    assert [len(prints) for prints in seen.values()] == [1, 1, 1]
    assert len(set.union(*seen.values())) == 3


# -- what is wrong is told --


def test_an_empty_database_is_an_error(engine, tmp_path, cache):
    engine.write(tmp_path / "empty", [])
    with pytest.raises(DataError, match="empty holds no records"):
        engine.source(tmp_path / "empty", cache_dir=cache)


def test_a_missing_path_is_an_error(engine, tmp_path, cache):
    with pytest.raises(ConfigError, match="there is no such folder"):
        engine.source(tmp_path / "nowhere", cache_dir=cache)


def test_a_file_is_an_error(engine, tmp_path, cache):
    (tmp_path / "file").write_bytes(b"data")
    with pytest.raises(ConfigError, match="is a file"):
        engine.source(tmp_path / "file", cache_dir=cache)


def test_another_folder_is_an_error(engine, tmp_path, cache):
    with pytest.raises(ConfigError, match="is no database: it has neither"):
        engine.source(tmp_path, cache_dir=cache)


def test_the_other_kind_of_database_is_an_error_that_names_the_flag(engine, tmp_path, cache):
    ENGINES[engine.other].write(tmp_path / "database", items())
    with pytest.raises(ConfigError, match=f"give --db_type {engine.other}"):
        engine.source(tmp_path / "database", cache_dir=cache)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's files need root to make")
def test_a_database_that_may_not_be_read_is_an_error(engine, folder, cache):
    for path in folder.iterdir():
        path.chmod(0o600)
    with read_only(folder), pytest.raises(ConfigError, match="may not read"):
        engine.source(folder, cache_dir=cache)


def test_a_file_of_junk_is_no_database(engine, folder, cache):
    marker = folder / ("data.mdb" if engine.name == "lmdb" else "CURRENT")
    marker.write_bytes(b"junk\n" * 5000)
    with pytest.raises(DataError, match=r"damaged|incomplete"):
        engine.source(folder, cache_dir=cache)


def test_an_incomplete_copy_is_an_error(engine, tmp_path, cache):
    folder = tmp_path / "database"
    engine.write(folder, [(k, v + bytes(70_000)) for k, v in items()])
    if engine.name == "lmdb":
        os.truncate(folder / "data.mdb", (folder / "data.mdb").stat().st_size // 2)
    else:
        compact(folder)
        next(folder.glob("*.ldb")).unlink()
    with pytest.raises(DataError, match="copy"):
        engine.source(folder, cache_dir=cache)


def test_a_first_record_of_no_format_is_told_at_once(engine, tmp_path, cache):
    engine.write(tmp_path / "text", [(b"a", b"hello"), (b"b", b"world")])
    with pytest.raises(DataError, match=r'"a".*neither'):
        engine.source(tmp_path / "text", cache_dir=cache)


def test_a_damaged_record_is_told_when_it_is_read(engine, tmp_path, cache):
    content = items()
    content[7] = (key(7), content[7][1][:20])
    engine.write(tmp_path / "database", content)
    for _ in range(2):
        with closing(engine.source(tmp_path / "database", cache_dir=cache)) as source:
            check_records(source, [0, 6, 8, RECORDS - 1])
            with pytest.raises(DataError, match="00000007_cat"):
                source[7]


def test_a_record_of_the_other_format_is_told_when_it_is_read(engine, tmp_path, cache):
    content = items()
    content[7] = (key(7), raw_tensorprotos(pixels(7), label(7)))
    engine.write(tmp_path / "database", content)
    with closing(engine.source(tmp_path / "database", cache_dir=cache)) as source:
        check_records(source, [0, 6, 8])
        with pytest.raises(DataError, match=r"00000007_cat.*one format"):
            source[7]


def compact(folder: Path) -> None:
    with plyvel.DB(str(folder)) as database:
        database.compact_range()
