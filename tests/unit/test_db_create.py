"""Databases made of folders, read back by the sources and by the databases themselves."""

from __future__ import annotations

import io
from contextlib import closing
from pathlib import Path

import lmdb
import numpy as np
import pytest
from PIL import Image

from paceline.config.db import DbCreateConfig, DbInfoConfig, DbType, Encoding, RecordFormat
from paceline.data.db.create import create_database
from paceline.data.db.index.database_index import INDEX_NAME
from paceline.data.db.inspect import inspect_database
from paceline.data.db.open_database import DATABASES, open_database
from paceline.data.db.write.new_database import NewDatabase
from paceline.data.image.image_file import check_image
from paceline.data.source import Pixels, Record
from paceline.errors import ConfigError, DataError
from tests.harness.data.image_folder import file_of, put, ramp, some_images


def silent(done: int, total: int) -> None:
    pass


def create(folder: Path, dest: Path, **options: object) -> NewDatabase:
    config = DbCreateConfig(folder=folder, dest=dest, **options)  # type: ignore[arg-type]
    return create_database(config, silent)


def records(db: Path, db_type: DbType = "lmdb") -> list[Record]:
    with closing(open_database(db, db_type, cache_dir=db.parent / "cache")) as source:
        return [source[i] for i in range(len(source))]


def raw(db: Path) -> list[tuple[bytes, bytes]]:
    with lmdb.open(str(db), readonly=True, lock=False) as opened, opened.begin() as transaction:
        return list(transaction.cursor())


def pixels_of(image: bytes | Pixels) -> Pixels:
    if isinstance(image, bytes):
        array = np.asarray(Image.open(io.BytesIO(image)))
        return array.reshape(*array.shape[:2], -1)
    return image


@pytest.mark.parametrize("db_type", DATABASES)
@pytest.mark.parametrize("record_format", ["tensorprotos", "datum"])
@pytest.mark.parametrize("encoding", ["jpeg", "png", "raw"])
def test_what_was_written_is_read(
    tmp_path: Path, db_type: DbType, record_format: RecordFormat, encoding: Encoding
) -> None:
    colour, other, grey = ramp(12, 20), ramp(17, 9, seed=3), ramp(8, 8)[:, :, 0]
    opaque = np.full((12, 20, 1), 100, dtype=np.uint8)
    put(tmp_path / "in", "ant/1.png", file_of(colour, "PNG"))
    put(tmp_path / "in", "bee/1.png", file_of(grey, "PNG"))
    put(tmp_path / "in", "bee/2.png", file_of(np.concatenate([colour, opaque], axis=2), "PNG"))
    put(tmp_path / "in", "cat/deep/1.bmp", file_of(other, "BMP"))
    db = tmp_path / "db"
    created = create(
        tmp_path / "in",
        db,
        db_type=db_type,
        format=record_format,
        encoding=encoding,
        shuffle_seed=None,
    )
    assert (created.labels, created.format) == ([0, 1, 1, 2], record_format)
    assert (created.classes, created.reduced.transparent) == (("ant", "bee", "cat"), 1)
    assert (created.skipped, created.damaged) == (0, [])
    read = records(db, db_type)
    assert [r.label for r in read] == [0, 1, 1, 2]
    for record, expected in zip(read, [colour, grey[:, :, None], colour, other], strict=True):
        found = pixels_of(record.image).astype(int)
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() <= (20 if encoding == "jpeg" else 0)
        assert check_image(record.image)[0] == encoding
    with closing(open_database(db, db_type, cache_dir=tmp_path / "cache")) as source:
        assert source.format == record_format
        assert source.label_names == ("ant", "bee", "cat")
        assert source.labels is not None
        assert source.labels.tolist() == [0, 1, 1, 2]
    assert (db / "labels.txt").read_text() == "ant\nbee\ncat\n"


def test_jpeg_files_are_stored_byte_by_byte(tmp_path: Path) -> None:
    some_images(tmp_path / "in", classes=2, each=3)
    create(tmp_path / "in", tmp_path / "db", shuffle_seed=None)
    files = sorted((tmp_path / "in").rglob("*.jpg"))
    assert [r.image for r in records(tmp_path / "db")] == [f.read_bytes() for f in files]


def test_keys_are_those_of_caffes_convert_imageset(tmp_path: Path) -> None:
    some_images(tmp_path / "in", classes=2, each=2)
    create(tmp_path / "in", tmp_path / "db", shuffle_seed=None)
    assert [key for key, _ in raw(tmp_path / "db")] == [
        b"00000000_class0/0.jpg",
        b"00000001_class0/1.jpg",
        b"00000002_class1/0.jpg",
        b"00000003_class1/1.jpg",
    ]


def test_the_longest_paths_fit_into_a_key(tmp_path: Path) -> None:
    name = "/".join(["a" * 200] * 3)
    for i in range(2):
        put(tmp_path / "in", f"{name}/{i}.jpg", file_of(ramp(8, 8), "JPEG"))
    create(tmp_path / "in", tmp_path / "db")
    assert len(raw(tmp_path / "db")) == 2


def test_records_are_shuffled_by_the_seed_and_their_content_stays(tmp_path: Path) -> None:
    some_images(tmp_path / "in", classes=3, each=6)
    for name, seed in (("none", None), ("zero", 0), ("one", 1)):
        create(tmp_path / "in", tmp_path / name, shuffle_seed=seed)
    images = {n: [r.image for r in records(tmp_path / n)] for n in ("none", "zero", "one")}
    labels = {n: [r.label for r in records(tmp_path / n)] for n in ("none", "zero", "one")}
    assert labels["none"] == sorted(labels["none"])
    assert len({tuple(i) for i in images.values()}) == 3
    pairs = [sorted(zip(images[n], labels[n], strict=True)) for n in images]
    assert pairs[0] == pairs[1] == pairs[2]


def test_any_number_of_threads_writes_the_same_bits(tmp_path: Path) -> None:
    some_images(tmp_path / "in", classes=4, each=25)
    for workers in (1, 2, 5):
        create(tmp_path / "in", tmp_path / str(workers), resize=8, workers=workers)
    assert raw(tmp_path / "1") == raw(tmp_path / "2") == raw(tmp_path / "5")
    files = {w: (tmp_path / w / "data.mdb").read_bytes() for w in ("1", "2", "5")}
    assert files["1"] == files["2"] == files["5"]


def test_what_is_no_image_is_skipped_and_counted(tmp_path: Path) -> None:
    some_images(tmp_path / "in", classes=2, each=3)
    put(tmp_path / "in", "class0/notes.txt", b"nothing to see")
    put(tmp_path / "in", "class1/.hidden.jpg", b"")
    put(tmp_path / "in", "readme.md", b"")
    (tmp_path / "in" / "class2").mkdir()
    created = create(tmp_path / "in", tmp_path / "db")
    assert (len(created.keys), created.skipped, set(created.labels)) == (6, 3, {0, 1})
    assert [key[:9] for key, _ in raw(tmp_path / "db")] == [b"%08d_" % i for i in range(6)]


@pytest.mark.parametrize("encoding", ["jpeg", "png", "raw"])
def test_an_image_that_is_encoded_anew_is_turned_upright(
    tmp_path: Path, encoding: Encoding
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter clockwise
    file = io.BytesIO()
    Image.fromarray(ramp(40, 60)).save(file, "JPEG", exif=exif, quality=100)
    put(tmp_path / "in", "a/1.jpg", file.getvalue())
    create(tmp_path / "in", tmp_path / "db", encoding=encoding, resize=20)
    (record,) = records(tmp_path / "db")
    found = pixels_of(record.image).astype(int)
    assert found.shape == (30, 20, 3)
    expected = np.asarray(Image.fromarray(np.rot90(ramp(40, 60), -1)).resize((20, 30), 2))
    assert np.abs(found - expected).mean() < 4
    if isinstance(record.image, bytes):
        assert 0x0112 not in Image.open(io.BytesIO(record.image)).getexif()


def test_only_transparency_that_is_seen_is_counted(tmp_path: Path) -> None:
    for name, alpha in (("clear", 100), ("opaque", 255)):
        image = np.dstack([ramp(8, 8), np.full((8, 8), alpha, np.uint8)])
        put(tmp_path / "in", f"a/{name}.png", file_of(image, "PNG"))
    assert create(tmp_path / "in", tmp_path / "db").reduced.transparent == 1


@pytest.mark.parametrize("encoding", ["png", "raw"])
def test_a_transparent_colour_of_a_png_is_counted(tmp_path: Path, encoding: Encoding) -> None:
    file = io.BytesIO()
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(file, "PNG", transparency=(0, 0, 0))
    put(tmp_path / "in", "a/1.png", file.getvalue())
    assert create(tmp_path / "in", tmp_path / "db", encoding=encoding).reduced.transparent == 1


def test_an_image_of_too_many_pixels_is_named(tmp_path: Path) -> None:
    put(tmp_path / "in", "a/1.png", file_of(np.zeros((13_300, 13_300), np.uint8), "PNG"))
    with pytest.raises(DataError, match=r"a/1.png is a damaged image: it has 13,300 × 13,300 pix"):
        create(tmp_path / "in", tmp_path / "db")


def test_a_damaged_image_ends_it_with_its_name_and_leaves_nothing(tmp_path: Path) -> None:
    some_images(tmp_path / "in")
    (tmp_path / "in/class1/2.jpg").write_bytes(file_of(ramp(16, 16), "JPEG")[:-40])
    with pytest.raises(DataError, match=r"class1/2.jpg is a damaged image: .*--skip_damaged"):
        create(tmp_path / "in", tmp_path / "db")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_damaged_images_can_be_left_out(tmp_path: Path) -> None:
    some_images(tmp_path / "in")
    (tmp_path / "in/class1/2.jpg").write_bytes(b"")
    (tmp_path / "in/class2/0.jpg").write_bytes(b"<html>not found</html>")
    created = create(tmp_path / "in", tmp_path / "db", skip_damaged=True)
    assert len(created.keys) == 13
    assert [line.partition(": ")[0] for line in sorted(created.damaged)] == [
        "class1/2.jpg",
        "class2/0.jpg",
    ]


def heic(number: int) -> tuple[str, bytes]:
    return f"{number}.heic", b"\0\0\0\x18ftypheic" + bytes(8)


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ([("1.jpg", b""), ("2.png", b"")], r"none of its 2 files .*the first: class9/1.jpg: "),
        ([heic(1)], r"its only file can't .*class9/1.heic: it is an image of the kind HEIC"),
        ([("a.txt", b""), ("b.md", b"")], r"none of its 2 files .*\(none is an image\)"),
        ([("a.txt", b""), heic(2)], "none of its 2 files .*the first: class9/2.heic"),
    ],
)
def test_a_class_that_loses_all_its_files_is_an_error(
    tmp_path: Path, files: list[tuple[str, bytes]], told: str
) -> None:
    some_images(tmp_path / "in")
    for name, content in files:
        put(tmp_path / "in/class9", name, content)
    with pytest.raises(DataError, match=f"class9: the class would have no record, because {told}"):
        create(tmp_path / "in", tmp_path / "db", skip_damaged=True, shuffle_seed=None)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_of_several_lost_classes_the_first_is_named_and_the_others_counted(tmp_path: Path) -> None:
    some_images(tmp_path / "in", classes=1)
    for name in ("lost1", "lost2", "lost3"):
        put(tmp_path / "in", f"{name}/1.jpg", b"")
    with pytest.raises(DataError, match=r"lost1: .*, and 2 other classes likewise\. Repair"):
        create(tmp_path / "in", tmp_path / "db", skip_damaged=True)


def test_a_class_whose_images_are_links_to_nothing_is_an_error(tmp_path: Path) -> None:
    some_images(tmp_path / "in", classes=1)
    (tmp_path / "in/dog").mkdir()
    (tmp_path / "in/dog/1.jpg").symlink_to("/nowhere/1.jpg")
    told = r"dog/1.jpg can't be read: No such file or directory \(a link to /nowhere/1.jpg\)\."
    with pytest.raises(DataError, match=told):
        create(tmp_path / "in", tmp_path / "db")
    with pytest.raises(DataError, match="dog: the class would have no record"):
        create(tmp_path / "in", tmp_path / "db", skip_damaged=True)


def test_a_link_to_nothing_beside_images_is_skipped_unless_it_is_named_as_one(
    tmp_path: Path,
) -> None:
    some_images(tmp_path / "in", classes=1)
    (tmp_path / "in/class0/notes.txt").symlink_to("/nowhere/notes.txt")
    (tmp_path / "in/class0/phone.heic").symlink_to("/nowhere/phone.heic")
    created = create(tmp_path / "in", tmp_path / "db", skip_damaged=True)
    assert created.skipped == 1
    assert [line.partition(":")[0] for line in created.damaged] == ["class0/phone.heic"]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    some_images(tmp_path / "in")
    put(tmp_path, "full/thing", b"precious")
    with pytest.raises(ConfigError, match="isn't empty"):
        create(tmp_path / "in", tmp_path / "full")
    with pytest.raises(ConfigError, match="is a file"):
        create(tmp_path / "in", tmp_path / "full/thing")
    assert (tmp_path / "full/thing").read_bytes() == b"precious"


def test_an_empty_or_missing_destination_is_used(tmp_path: Path) -> None:
    some_images(tmp_path / "in")
    (tmp_path / "empty").mkdir()
    create(tmp_path / "in", tmp_path / "empty")
    create(tmp_path / "in", tmp_path / "new/place/db")
    assert raw(tmp_path / "empty") == raw(tmp_path / "new/place/db")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "in", "new"]


def test_places_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    some_images(tmp_path / "in")
    (tmp_path / "nothing/class").mkdir(parents=True)
    with pytest.raises(ConfigError, match="isn't a folder"):
        create(tmp_path / "missing", tmp_path / "db")
    with pytest.raises(ConfigError, match="is inside"):
        create(tmp_path / "in", tmp_path / "in/db")
    with pytest.raises(ConfigError, match="holds no images"):
        create(tmp_path / "nothing", tmp_path / "db")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "nothing"]


@pytest.mark.parametrize("db_type", DATABASES)
def test_a_report_counts_records_sizes_and_labels(tmp_path: Path, db_type: DbType) -> None:
    for i, width in enumerate((10, 10, 20, 40)):
        put(tmp_path / "in", f"ant/{i}.jpg", file_of(ramp(8, width), "JPEG"))
    put(tmp_path / "in", "bee/0.jpg", file_of(ramp(6, 30), "JPEG"))
    create(tmp_path / "in", tmp_path / "db", db_type=db_type, format="tensorprotos")
    report = inspect_database(DbInfoConfig(path=tmp_path / "db"), silent)
    assert (report.db_type, report.records, report.record_format) == (db_type, 5, "tensorprotos")
    assert dict(report.encodings) == {"jpeg": 5}
    assert dict(report.labels) == {0: 4, 1: 1}
    assert report.label_names == ("ant", "bee")
    assert report.sizes[10, 8] == 2
    assert report.sides(0) == (10, 20, 40)
    assert report.sides(1) == (6, 8, 8)
    assert (report.damaged, report.first_damaged) == (0, None)


def test_a_report_names_the_first_damaged_record_by_its_key(tmp_path: Path) -> None:
    some_images(tmp_path / "in", classes=1, each=5)
    create(tmp_path / "in", tmp_path / "db", shuffle_seed=None)
    damage(tmp_path / "db", b"00000002_class0/2.jpg", cut_image)
    damage(tmp_path / "db", b"00000004_class0/4.jpg", lambda value: b"junk")
    report = inspect_database(DbInfoConfig(path=tmp_path / "db"), silent)
    assert (report.records, report.damaged, report.labels[0]) == (5, 2, 3)
    assert report.first_damaged is not None
    assert '"00000002_class0/2.jpg" of ' in report.first_damaged
    assert "has a damaged image: " in report.first_damaged
    assert report.first_damaged.endswith(". Repair or remove it.")


def test_a_read_only_database_without_an_index_is_reported_too(tmp_path: Path) -> None:
    some_images(tmp_path / "in", classes=1, each=5)
    create(tmp_path / "in", tmp_path / "db", shuffle_seed=None)
    (tmp_path / "db" / INDEX_NAME).unlink()
    (tmp_path / "db" / INDEX_NAME).mkdir()  # nothing can be written there, even by root
    report = inspect_database(DbInfoConfig(path=tmp_path / "db"), silent)
    assert (report.records, report.damaged) == (5, 0)


def damage(db: Path, key: bytes, change: object) -> None:
    assert callable(change)
    with lmdb.open(str(db), lock=False) as environment, environment.begin(write=True) as access:
        value = access.get(key)
        assert value is not None
        access.put(key, change(value))


def cut_image(value: bytes) -> bytes:
    from paceline.data.db.formats.record_formats import decode_record, encode_record

    record, _ = decode_record(value)
    assert isinstance(record.image, bytes)
    return encode_record(record.image[:-60], record.label, "datum")
