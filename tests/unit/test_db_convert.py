"""Databases made of databases: what is kept, what is recoded, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from paceline.config.db import DbConvertConfig, DbCreateConfig, DbType, Encoding, RecordFormat
from paceline.data.db.convert import convert_database
from paceline.data.db.create import create_database
from paceline.data.db.indexed_source import IndexedSource
from paceline.data.db.open_database import open_database
from paceline.data.db.write.new_database import NewDatabase
from paceline.data.image.image_file import check_image
from paceline.errors import ConfigError, DataError
from tests.harness.data.databases import ENGINES, RECORDS, check_records, items, key, labels
from tests.harness.data.image_folder import file_of, put, ramp, some_images
from tests.harness.data.record_bytes import encoded_tensorprotos


def silent(done: int, total: int) -> None:
    pass


def convert(source: Path, dest: Path, **options: object) -> NewDatabase:
    config = DbConvertConfig(source=source, dest=dest, **options)  # type: ignore[arg-type]
    return convert_database(config, silent)


def stored(path: Path) -> list[tuple[bytes, bytes]]:
    with closing(open_database(path, cache_dir=path.parent / "cache")) as source:
        return [source.stored(i) for i in range(len(source))]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """An LMDB of JPEG files, as `paceline db create` makes it."""
    some_images(tmp_path / "in", classes=3, each=4)
    config = DbCreateConfig(folder=tmp_path / "in", dest=tmp_path / "photos")
    create_database(config, silent)
    return tmp_path / "photos"


@pytest.fixture
def source(photos: Path, tmp_path: Path) -> Iterator[IndexedSource]:
    with closing(open_database(photos, cache_dir=tmp_path / "cache")) as source:
        yield source


def test_a_chain_over_all_kinds_and_formats_returns_to_the_same_bytes(
    photos: Path, tmp_path: Path
) -> None:
    steps: list[tuple[DbType, RecordFormat | None]] = [
        ("leveldb", "tensorprotos"),
        ("minidb", None),
        ("minidb", "datum"),
        ("lmdb", "tensorprotos"),
        ("minidb", None),
        ("leveldb", "datum"),
        ("lmdb", None),
    ]
    places = [photos, *(tmp_path / f"step{i}" for i in range(len(steps)))]
    for (old, new), (db_type, record_format) in zip(pairwise(places), steps, strict=True):
        converted = convert(old, new, db_type=db_type, format=record_format)
        assert len(converted.keys) == 12
        with closing(open_database(new, db_type, cache_dir=tmp_path / "cache")) as source:
            assert source.format == converted.format == (record_format or source.format)
            assert source.label_names == ("class0", "class1", "class2")
    assert stored(places[-1]) == stored(photos)
    for name in ("data.mdb", "labels.txt", "paceline.index"):
        assert (places[-1] / name).read_bytes() == (photos / name).read_bytes()


@pytest.mark.parametrize("kind", ENGINES)
def test_another_programs_database_keeps_keys_order_and_labels(kind: str, tmp_path: Path) -> None:
    ENGINES[kind].write(tmp_path / "old", items())
    (tmp_path / "old/labels.txt").write_text("ant\nbee\n")
    convert(tmp_path / "old", tmp_path / "new", db_type="minidb", format="tensorprotos")
    assert [name for name, _ in stored(tmp_path / "new")] == [key(i) for i in range(RECORDS)]
    with closing(open_database(tmp_path / "new")) as source:
        assert source.labels is not None
        assert source.labels.tolist() == labels()
        assert source.label_names == ("ant", "bee")
        assert source.format == "tensorprotos"
        check_records(source)


@pytest.mark.parametrize("record_format", ["tensorprotos", "datum"])
@pytest.mark.parametrize("encoding", ["jpeg", "png", "raw"])
def test_images_are_encoded_anew(
    source: IndexedSource,
    photos: Path,
    tmp_path: Path,
    encoding: Encoding,
    record_format: RecordFormat,
) -> None:
    convert(photos, tmp_path / "raw", encoding="raw")
    convert(tmp_path / "raw", tmp_path / "new", encoding=encoding, format=record_format)
    with (
        closing(open_database(tmp_path / "raw")) as raw,
        closing(open_database(tmp_path / "new")) as new,
    ):
        assert new.format == record_format
        for i in range(len(source)):
            kind, size = check_image(new[i].image)
            assert kind == encoding
            assert check_image(raw[i].image) == ("raw", size)
            assert check_image(source[i].image)[1] == size
            assert new[i].label == raw[i].label == source[i].label
    if encoding == "png":
        convert(tmp_path / "new", tmp_path / "back", encoding="raw", format="datum")
        assert stored(tmp_path / "back") == stored(tmp_path / "raw")


def test_jpeg_files_stay_as_they_are_when_jpeg_is_asked_for(photos: Path, tmp_path: Path) -> None:
    convert(photos, tmp_path / "new", encoding="jpeg")
    assert stored(tmp_path / "new") == stored(photos)


def test_any_number_of_threads_writes_the_same_bits(photos: Path, tmp_path: Path) -> None:
    for workers in (1, 3):
        convert(photos, tmp_path / str(workers), db_type="minidb", encoding="png", workers=workers)
    files = [(tmp_path / name / "data.minidb").read_bytes() for name in ("1", "3")]
    assert files[0] == files[1]


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A database of which record 1 has half an image, and record 3 is nothing."""
    content = [encoded_tensorprotos(file_of(ramp(16, 16, seed=i), "JPEG"), i) for i in range(6)]
    content[1] = encoded_tensorprotos(file_of(ramp(16, 16), "JPEG")[:-60], 1)
    content[3] = b"junk"
    ENGINES["leveldb"].write(tmp_path / "damaged", [(key(i), v) for i, v in enumerate(content)])
    return tmp_path / "damaged"


@pytest.mark.parametrize("options", [{}, {"encoding": "raw"}])
def test_a_damaged_record_ends_it_with_its_key_and_leaves_nothing(
    damaged: Path, tmp_path: Path, options: dict[str, str]
) -> None:
    with pytest.raises(DataError, match=r'"00000001_.*damaged has a damaged .*--skip_damaged'):
        convert(damaged, tmp_path / "new", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


def test_a_label_that_loses_all_its_records_is_an_error(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (400, 400, 3), np.uint8)
    images = [file_of(np.roll(noise, shift), "JPEG") for shift in range(3)]
    for name, image in zip(("ant", "bee", "cat"), images, strict=True):
        put(tmp_path / "in", f"{name}/1.jpg", image)
    old = tmp_path / "old"
    create_database(
        DbCreateConfig(folder=tmp_path / "in", dest=old, db_type="minidb", shuffle_seed=None),
        silent,
    )
    content = (old / "data.minidb").read_bytes()
    damaged = content.replace(images[1], bytes(len(images[1])))  # the index with labels still fits
    (old / "data.minidb").write_bytes(damaged)
    with pytest.raises(
        DataError, match=r"all records of label 1 \(bee\) are damaged, .*: record .*bee/1\.jpg"
    ):
        convert(old, tmp_path / "new", skip_damaged=True)
    assert not (tmp_path / "new").exists()


def test_damaged_records_can_be_left_out(damaged: Path, tmp_path: Path) -> None:
    converted = convert(damaged, tmp_path / "new", skip_damaged=True)
    assert len(converted.keys) == 4
    assert [name.split('"')[1][:8] for name in converted.damaged] == ["00000001", "00000003"]
    assert stored(tmp_path / "new") == [stored(damaged)[i] for i in (0, 2, 4, 5)]


def test_a_database_of_damaged_records_alone_is_no_database(tmp_path: Path) -> None:
    cut = encoded_tensorprotos(file_of(ramp(16, 16), "JPEG")[:-60], 1)
    ENGINES["lmdb"].write(tmp_path / "old", [(key(0), cut)])
    with pytest.raises(DataError, match="all of its records are damaged"):
        convert(tmp_path / "old", tmp_path / "new", skip_damaged=True)
    assert not (tmp_path / "new").exists()


def test_nothing_is_overwritten_and_nothing_written_into_the_source(
    photos: Path, tmp_path: Path
) -> None:
    before = stored(photos)
    (tmp_path / "file").write_bytes(b"precious")
    for dest, told in (
        (photos, "isn't empty"),
        (tmp_path / "file", "is a file: give the name of a new folder"),
        (photos / "inside", "is inside .*photos, which is being read"),
    ):
        with pytest.raises(ConfigError, match=told):
            convert(photos, dest)
    with pytest.raises(ConfigError, match="there is no such folder or file"):
        convert(tmp_path / "nowhere", tmp_path / "new")
    assert stored(photos) == before
    assert (tmp_path / "file").read_bytes() == b"precious"
    assert not (tmp_path / "new").exists()


def test_keys_that_an_lmdb_cannot_have_are_refused(tmp_path: Path) -> None:
    ENGINES["leveldb"].write(tmp_path / "old", [(b"k" * 600, items()[0][1])])
    with pytest.raises(ConfigError, match=r"of 600 bytes, but keys of lmdb must have 1 to 511 "):
        convert(tmp_path / "old", tmp_path / "new")
    convert(tmp_path / "old", tmp_path / "new", db_type="minidb")
    assert stored(tmp_path / "new") == [(b"k" * 600, items()[0][1])]


def test_equal_keys_are_refused(tmp_path: Path) -> None:
    ENGINES["minidb"].write(tmp_path / "old", [items()[0], items()[1], items()[0]])
    with pytest.raises(ConfigError, match=r'two records with the key "00000000_cat/0.jpg"'):
        convert(tmp_path / "old", tmp_path / "new")
    assert not (tmp_path / "new").exists()
