"""What a database's index must do, for every kind alike: speed up, and never mislead."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from paceline.data.db.index.database_index import INDEX_NAME, LABELS_NAME, write_index
from paceline.errors import ConfigError, DataError
from tests.harness.data.databases import (
    RECORDS,
    check_records,
    items,
    key,
    label,
    labels,
    pixels,
)
from tests.harness.data.permissions import read_only
from tests.harness.data.record_bytes import bgr_planes, raw_datum

NAMES = tuple(f"class {i}" for i in range(10))


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
    write(folder, order)
    with closing(engine.source(folder, cache_dir=cache)) as source:
        check_records(source)
        assert source.labels is not None
        assert source.labels.dtype == np.int64
        assert source.labels.tolist() == labels()
        assert source.label_names == NAMES
    assert (folder / LABELS_NAME).read_text().splitlines() == list(NAMES)


def test_an_index_travels_with_a_copy(engine, folder, cache, tmp_path):
    write(folder)
    shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile)  # new times
    with closing(engine.source(tmp_path / "copy", cache_dir=cache)) as source:
        assert source.labels is not None


def test_an_index_is_dropped_when_the_database_has_changed(engine, folder, cache):
    write(folder)
    engine.write(folder, [(key(RECORDS), raw_datum(bgr_planes(pixels(1)), 99))])
    with closing(engine.source(folder, cache_dir=cache)) as source:
        assert len(source) == RECORDS + 1
        assert source[RECORDS].label == 99
        assert source.labels is None
        assert source.label_names == NAMES  # labels.txt is still there


def test_the_index_of_a_rewritten_database_is_dropped_though_all_sizes_are_equal(
    engine, folder, cache, tmp_path
):
    write(folder)
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
    write(tmp_path / "database", labels=wrong)
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


def write(
    folder: Path,
    order: Sequence[int] = range(RECORDS),
    labels: Sequence[int] | None = None,
) -> None:
    """Write an index of the records of `items()`, given in some order."""
    records = items()
    sizes = [8 + len(key) + len(value) for key, value in records]
    begins = np.cumsum([0, *sizes]).tolist()
    write_index(
        folder,
        keys=[records[i][0] for i in order],
        labels=labels or [label(i) for i in order],
        label_names=NAMES,
        record_format="datum",
        offsets=[begins[i] for i in order] if (folder / "data.minidb").exists() else None,
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
