"""What every source over a database must do, for LMDB, LevelDB and minidb alike."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import plyvel
import pytest

from paceline.errors import ConfigError, DataError
from tests.harness.data.databases import (
    ENGINES,
    RECORDS,
    check_records,
    items,
    key,
    label,
    pixels,
)
from tests.harness.data.permissions import read_only
from tests.harness.data.record_bytes import bgr_planes, raw_datum, raw_tensorprotos

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


def test_all_databases_have_the_same_fingerprint_and_other_data_another(tmp_path, cache):
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


def test_labels_that_are_swapped_give_another_fingerprint(engine, tmp_path, cache):
    numbers = {i: 1 - label(i) if label(i) < 2 else label(i) for i in range(RECORDS)}
    changed = [(key(i), raw_datum(bgr_planes(pixels(i)), n)) for i, n in numbers.items()]
    fingerprints = set()
    for name, content in (("one", items()), ("other", changed)):
        engine.write(tmp_path / name, content)
        with closing(engine.source(tmp_path / name, cache_dir=cache)) as source:
            fingerprints.add(source.fingerprint)
    assert len(fingerprints) == 2


# -- what is wrong is told --


def test_an_empty_database_is_an_error(engine, tmp_path, cache):
    engine.write(tmp_path / "empty", [])
    with pytest.raises(DataError, match="empty holds no records"):
        engine.source(tmp_path / "empty", cache_dir=cache)


def test_a_missing_path_is_an_error(engine, tmp_path, cache):
    with pytest.raises(ConfigError, match="there is no such folder or file"):
        engine.source(tmp_path / "nowhere", cache_dir=cache)


def test_a_file_is_an_error(engine, tmp_path, cache):
    (tmp_path / "file").write_bytes(b"data")
    told = "or this is not a minidb" if engine.name == "minidb" else "is a file.*--db_type minidb"
    with pytest.raises((ConfigError, DataError), match=told):
        engine.source(tmp_path / "file", cache_dir=cache)


def test_another_folder_is_an_error(engine, tmp_path, cache):
    with pytest.raises(ConfigError, match="is not a database: it has none of"):
        engine.source(tmp_path, cache_dir=cache)


def test_the_other_kind_of_database_is_an_error_that_names_the_flag(engine, tmp_path, cache):
    ENGINES[engine.other].write(tmp_path / "database", items())
    with pytest.raises(ConfigError, match=f"give --db_type {engine.other}"):
        engine.source(tmp_path / "database", cache_dir=cache)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's files need root to make")
def test_a_database_that_may_not_be_read_is_an_error(engine, folder, cache):
    for path in folder.iterdir():
        path.chmod(0o600)
    with read_only(folder), pytest.raises(ConfigError, match="have no permission to read"):
        engine.source(folder, cache_dir=cache)


def test_a_file_of_junk_is_no_database(engine, folder, cache):
    (folder / engine.marker).write_bytes(b"junk\n" * 5000)
    with pytest.raises(DataError, match=r"damaged|incomplete"):
        engine.source(folder, cache_dir=cache)


def test_an_incomplete_copy_is_an_error(engine, tmp_path, cache):
    folder = tmp_path / "database"
    engine.write(folder, [(k, v + bytes(70_000)) for k, v in items()])
    if engine.name == "leveldb":
        compact(folder)
        next(folder.glob("*.ldb")).unlink()
    else:
        os.truncate(folder / engine.marker, (folder / engine.marker).stat().st_size // 2)
    with pytest.raises(DataError, match="copy"):
        engine.source(folder, cache_dir=cache)


def test_records_of_no_format_are_told_at_once(engine, tmp_path, cache):
    engine.write(tmp_path / "text", [(b"a", b"hello"), (b"b", b"world")])
    with pytest.raises(DataError, match=r'"a".*neither'):
        engine.source(tmp_path / "text", cache_dir=cache)


@pytest.mark.parametrize("damaged", [0, 7])
def test_a_damaged_record_is_told_when_it_is_read(engine, tmp_path, cache, damaged):
    content = items()
    content[damaged] = (key(damaged), content[damaged][1][:20])
    engine.write(tmp_path / "database", content)
    for _ in range(2):
        with closing(engine.source(tmp_path / "database", cache_dir=cache)) as source:
            check_records(source, [1, 6, 8, RECORDS - 1])
            with pytest.raises(DataError, match=f"0000000{damaged}_cat.*of .*database: its"):
                source[damaged]


@pytest.mark.parametrize("other", [0, 7])
def test_a_record_of_the_other_format_is_told_when_it_is_read(engine, tmp_path, cache, other):
    content = items()
    content[other] = (key(other), raw_tensorprotos(pixels(other), label(other)))
    engine.write(tmp_path / "database", content)
    with closing(engine.source(tmp_path / "database", cache_dir=cache)) as source:
        check_records(source, [1, 6, 8])
        with pytest.raises(DataError, match=rf"0000000{other}_cat.*one format"):
            source[other]


def test_a_stored_record_is_its_key_and_its_bytes(engine, folder, cache):
    with closing(engine.source(folder, cache_dir=cache)) as source:
        assert [source.stored(i) for i in range(RECORDS)] == items()


def compact(folder: Path) -> None:
    with plyvel.DB(str(folder)) as database:
        database.compact_range()
