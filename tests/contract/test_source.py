"""What every source over a database must do, for LMDB and LevelDB alike.

The databases are written as another program would: by the databases' own libraries, with records
made by hand.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import lmdb
import numpy as np
import plyvel
import pytest

from paceline.data.index import INDEX_NAME, LABELS_NAME, write_index
from paceline.data.indexed_source import IndexedSource
from paceline.data.leveldb_source import LevelDbSource
from paceline.data.lmdb_source import LmdbSource
from paceline.errors import ConfigError, DataError
from tests.harness.wire import bgr_planes, raw_datum, raw_tensorprotos

RECORDS = 40
NOBODY = 65534


def write_lmdb(folder: Path, items: Sequence[tuple[bytes, bytes]]) -> None:
    environment = lmdb.open(str(folder), map_size=1 << 26)
    with closing(environment), environment.begin(write=True) as transaction:
        for key, value in items:
            transaction.put(key, value)


def write_leveldb(folder: Path, items: Sequence[tuple[bytes, bytes]]) -> None:
    with plyvel.DB(str(folder), create_if_missing=True) as database:
        for key, value in items:
            database.put(key, value)


@dataclass(frozen=True)
class Engine:
    name: str
    other: str
    write: Callable[[Path, Sequence[tuple[bytes, bytes]]], None]
    source: type[LmdbSource] | type[LevelDbSource]


ENGINES = {
    "lmdb": Engine("lmdb", "leveldb", write_lmdb, LmdbSource),
    "leveldb": Engine("leveldb", "lmdb", write_leveldb, LevelDbSource),
}


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


@contextmanager
def read_only(*folders: Path) -> Iterator[None]:
    """Take the right to write in `folders`, from root too."""
    for folder in folders:
        folder.chmod(0o555)
    root = os.geteuid() == 0
    try:
        if root:
            for parent in folders[0].parents[:3]:  # pytest's own are closed to others
                parent.chmod(0o755)
            os.seteuid(NOBODY)
        yield
    finally:
        if root:
            os.seteuid(0)
        for folder in folders:
            folder.chmod(0o755)


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


# -- the index --


def test_a_foreign_database_gets_an_index_and_keeps_the_rest_of_its_files(engine, folder, cache):
    before = contents(folder)
    for _ in range(2):
        with closing(engine.source(folder, cache_dir=cache)) as source:
            check_records(source)
            assert (source.labels, source.label_names, source.index_note) == (None, None, None)
        after = contents(folder)
        assert after.pop(INDEX_NAME)
        assert after == before


def test_the_second_open_reads_the_keys_from_the_index(engine, folder, cache):
    engine.source(folder, cache_dir=cache).close()
    index = (folder / INDEX_NAME).read_bytes()
    inode = (folder / INDEX_NAME).stat().st_ino
    with closing(engine.source(folder, cache_dir=cache)) as source:
        check_records(source)
    assert (folder / INDEX_NAME).read_bytes() == index
    assert (folder / INDEX_NAME).stat().st_ino == inode  # not written anew


def test_a_written_index_knows_labels_names_and_order(engine, folder, cache):
    order = list(range(RECORDS))[::-1]  # as if written backwards
    write(folder, [key(i) for i in order], [label(i) for i in order])
    with closing(engine.source(folder, cache_dir=cache)) as source:
        check_records(source)
        assert source.labels is not None
        assert source.labels.dtype == np.int64
        assert source.labels.tolist() == labels()
        assert source.label_names == NAMES
    assert (folder / LABELS_NAME).read_text().splitlines() == list(NAMES)


def test_an_index_travels_with_a_copy(engine, folder, cache, tmp_path):
    write(folder, [key(i) for i in range(RECORDS)], labels())
    shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile)  # new times
    with closing(engine.source(tmp_path / "copy", cache_dir=cache)) as source:
        assert source.labels is not None


def test_an_index_is_dropped_when_the_database_has_changed(engine, folder, cache):
    write(folder, [key(i) for i in range(RECORDS)], labels())
    engine.write(folder, [(key(RECORDS), raw_datum(bgr_planes(pixels(1)), 99))])
    with closing(engine.source(folder, cache_dir=cache)) as source:
        assert len(source) == RECORDS + 1
        assert source[RECORDS].label == 99
        assert source.labels is None
        assert source.label_names == NAMES  # labels.txt is still there


def test_the_index_of_a_rewritten_database_is_dropped_though_all_sizes_are_equal(
    engine, folder, cache, tmp_path
):
    write(folder, [key(i) for i in range(RECORDS)], labels())
    relabelled = [(key(i), raw_datum(bgr_planes(pixels(i)), label(i + 1))) for i in range(RECORDS)]
    engine.write(tmp_path / "again", relabelled)
    shutil.copyfile(folder / INDEX_NAME, tmp_path / "again" / INDEX_NAME)
    with closing(engine.source(tmp_path / "again", cache_dir=cache)) as source:
        assert source.labels is None
        assert source[3].label == label(4)


def test_a_record_whose_label_differs_from_the_index_is_an_error(engine, tmp_path, cache):
    """One label in the middle differs: sampling at open needn't see it, reading must."""
    engine.write(tmp_path / "database", items())
    wrong = labels()
    wrong[1] += 1
    write(tmp_path / "database", [key(i) for i in range(RECORDS)], wrong)
    with (
        closing(engine.source(tmp_path / "database", cache_dir=cache)) as source,
        pytest.raises(DataError, match=rf"00000001_cat.*{INDEX_NAME}"),
    ):
        source[1]


def test_a_damaged_index_is_made_again(engine, folder, cache):
    engine.source(folder, cache_dir=cache).close()
    whole = (folder / INDEX_NAME).read_bytes()
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 1
    for content in (b"", whole[: len(whole) // 2], bytes(damaged)):
        (folder / INDEX_NAME).write_bytes(content)
        with closing(engine.source(folder, cache_dir=cache)) as source:
            check_records(source)
        assert (folder / INDEX_NAME).read_bytes() == whole


def test_label_names_of_a_foreign_database_are_read(engine, folder, cache):
    (folder / LABELS_NAME).write_text("Katze\nHund\n", encoding="utf-8")
    with closing(engine.source(folder, cache_dir=cache)) as source:
        assert source.label_names == ("Katze", "Hund")


def test_a_label_name_with_a_line_break_is_refused(engine, folder):
    with pytest.raises(ConfigError, match="line break"):
        write_index(folder, keys=[], labels=[], label_names=["a\nb"], record_format="datum")


def test_the_index_of_a_read_only_folder_goes_to_the_cache(engine, folder, cache):
    cache.mkdir(mode=0o777)
    cache.chmod(0o777)
    before = contents(folder)
    with read_only(folder):
        for _ in range(2):
            with closing(engine.source(folder, cache_dir=cache)) as source:
                check_records(source)
                assert source.index_note is None
            (index,) = cache.glob("database-*.index")
    assert index.stat().st_size > RECORDS * len(key(0))
    assert contents(folder) == before


def test_without_a_place_for_the_index_a_source_works_and_says_so(
    engine, folder, tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (tmp_path / "temporary").chmod(0o777)
    with read_only(folder), closing(engine.source(folder)) as source:
        check_records(source)
        assert source.index_note is not None
        assert "--cache_dir" in source.index_note
        assert str(folder) in source.index_note


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
    with pytest.raises(ConfigError, match=f"is no {engine.name} database"):
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


NAMES = tuple(f"class {i}" for i in range(10))


def write(folder: Path, keys: Sequence[bytes], of: Sequence[int]) -> None:
    write_index(folder, keys=keys, labels=of, label_names=NAMES, record_format="datum")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def compact(folder: Path) -> None:
    with plyvel.DB(str(folder)) as database:
        database.compact_range()
