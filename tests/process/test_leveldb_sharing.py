"""LevelDB admits one process; through views several processes of a machine read one database."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import plyvel
import pytest

from paceline.data.db.index.database_index import INDEX_NAME
from paceline.data.db.indexed_source import IndexedSource
from paceline.data.db.leveldb.private_view import LevelDbView
from paceline.data.db.open_database import open_database
from paceline.errors import ConfigError, DataError
from tests.harness.data.record_bytes import raw_datum

RECORDS = 1500
SIDE = 36  # 3 × 36 × 36 bytes a record
LIMIT = 60  # seconds that a reader may take to say something
CONTEXT = multiprocessing.get_context("spawn")


def bgr_planes_of(i: int) -> np.ndarray:
    return np.random.default_rng(i).integers(0, 256, (3, SIDE, SIDE), np.uint8)


def label(i: int) -> int:
    return int(i) % 10


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A database whose tables LevelDB would like to merge, with a log that it never did."""
    folder = tmp_path / "database"
    with plyvel.DB(
        str(folder), create_if_missing=True, compression=None, write_buffer_size=256 << 10
    ) as database:
        for i in np.random.default_rng(0).permutation(RECORDS):
            database.put(b"%08d" % i, raw_datum(bgr_planes_of(i), label(i)))
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def reader(pipe: Connection, folder: Path, cache: Path, seed: int) -> None:
    """Open, say so, wait for a word, read everything in an own order, send a digest."""
    with closing(open_database(folder, "leveldb", cache_dir=cache)) as source:
        pipe.send("open")
        pipe.recv()
        pipe.send(digest(source, seed))
        pipe.recv()


def digest(source: IndexedSource, seed: int) -> str:
    parts = [b""] * len(source)
    for i in np.random.default_rng(seed).permutation(len(source)):
        record = source[int(i)]
        assert isinstance(record.image, np.ndarray)
        parts[i] = b"%d" % record.label + record.image.tobytes()
    return hashlib.sha256(b"".join(parts)).hexdigest()


@contextmanager
def readers(count: int, *args: object) -> Iterator[list[tuple[BaseProcess, Connection]]]:
    """Start processes that all have the database open when the block begins."""
    started: list[tuple[BaseProcess, Connection]] = []
    try:
        for seed in range(count):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=reader, args=(theirs, *args, seed), daemon=True)
            process.start()
            theirs.close()
            started.append((process, ours))
        for _, pipe in started:
            assert heard(pipe) == "open"
        yield started
    finally:
        for process, pipe in started:
            process.kill()
            process.join()
            pipe.close()


def heard(pipe: Connection) -> object:
    assert pipe.poll(LIMIT), f"a reader said nothing for {LIMIT} s"
    return pipe.recv()


def files(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    return {
        path.name: (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino)
        for path in folder.iterdir()
    }


def views(cache: Path) -> list[Path]:
    return sorted(path for path in cache.glob("paceline-views-*/*") if path.is_dir())


def test_three_processes_read_one_database_at_once_and_leave_it_as_it_is(folder, cache):
    before = files(folder)
    with readers(3, folder, cache) as started:
        assert len(views(cache)) == 3
        for _, pipe in started:
            pipe.send("read")
        digests = {heard(pipe) for _, pipe in started}
        for process, pipe in started:
            pipe.send("close")
            process.join(LIMIT)
            assert process.exitcode == 0
    assert digests == {expected_digest()}
    after = files(folder)
    assert after.pop(INDEX_NAME)
    assert after == before
    assert not list(cache.glob("paceline-views-*/*"))


def test_tables_that_no_manifest_names_are_not_written_through(folder, cache):
    """A process that ends while it merges leaves tables whose numbers LevelDB gives out again."""
    highest = max(int(path.stem) for path in folder.iterdir() if path.stem.isdecimal())
    for number in range(highest + 1, highest + 9):
        (folder / f"{number:06}.ldb").write_bytes(b"left behind")
    before = files(folder)
    with closing(open_database(folder, "leveldb", cache_dir=cache)) as source:
        assert digest(source, 0) == expected_digest()
    after = files(folder)
    assert after.pop(INDEX_NAME)
    assert after == before


def test_a_view_takes_the_disk_of_the_log_and_not_of_the_data(folder, cache):
    data = sum(path.stat().st_size for path in folder.glob("*.ldb"))
    log = sum(path.stat().st_size for path in folder.glob("*.log"))
    with closing(open_database(folder, "leveldb", cache_dir=cache)) as source:
        for seed in range(3):  # reading much is what starts LevelDB's merges
            assert digest(source, seed) == expected_digest()
        (view,) = views(cache)
        assert b"Compacting" in (view / "LOG").read_bytes()  # it did want to
        own = sum(path.lstat().st_size for path in view.iterdir() if path.is_file())
        begun = 3 << 20  # a merge gets no further than the table that it had begun, of 2 MiB
        assert own < 2 * log + begun < data


def test_the_view_of_a_killed_process_is_removed_and_that_of_a_living_one_is_not(folder, cache):
    with readers(2, folder, cache) as started:
        (victim, _), (_, pipe) = started
        both = views(cache)
        victim.kill()
        victim.join()
        assert views(cache) == both
        with closing(open_database(folder, "leveldb", cache_dir=cache)):
            kept = views(cache)
            assert len(kept) == 2  # ours and the living one's
            assert [path for path in both if path not in kept] == [
                path for path in both if path.name.startswith(f"{victim.pid}-")
            ]
        pipe.send("read")
        assert heard(pipe) == expected_digest()


def test_views_made_and_removed_by_many_processes_at_once_never_meet(folder, tmp_path):
    base = tmp_path / "cache"
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        counts = pool.starmap_async(make_views, [(folder, base, 60)] * 3).get(LIMIT)
    assert counts == [60, 60, 60]
    assert not list(base.glob("paceline-views-*/*"))


def make_views(folder: Path, cache: Path, count: int) -> int:
    """Make and remove views, each whole while it is there."""
    whole = 0
    for _ in range(count):
        view = LevelDbView(folder, cache)
        whole += (view.path / "CURRENT").exists()
        view.close()
    return whole


def test_too_little_disk_for_the_log_is_a_sentence_and_leaves_nothing(folder, cache):
    free = shutil.disk_usage(folder).free
    with (folder / "999999.log").open("wb") as log:
        log.truncate(free + (1 << 30))  # a hole, which takes no room here
    with pytest.raises(DataError, match=r"MiB free.*--cache_dir"):
        open_database(folder, "leveldb", cache_dir=cache)
    assert not list(cache.glob("paceline-views-*/*"))


def test_a_cache_that_cannot_be_written_is_a_sentence(folder, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="give a --cache_dir that can be written"):
        open_database(folder, "leveldb", cache_dir=tmp_path / "file")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to somebody else")
def test_a_folder_for_views_that_belongs_to_somebody_else_is_refused(folder, cache):
    open_database(folder, "leveldb", cache_dir=cache).close()
    (base,) = cache.glob("paceline-views-*")
    os.chown(base, 65534, 65534)
    with pytest.raises(ConfigError, match="belongs to another user"):
        open_database(folder, "leveldb", cache_dir=cache)


def expected_digest() -> str:
    reference = hashlib.sha256()
    for i in range(RECORDS):
        rgb = bgr_planes_of(i)[::-1].transpose(1, 2, 0)
        reference.update(b"%d" % label(i) + rgb.tobytes())
    return reference.hexdigest()
