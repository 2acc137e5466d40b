"""What is special about minidb: one file without a header, walked once, torn where it is torn."""

from __future__ import annotations

import os
import shutil
import struct
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from paceline.data.db.database_files import stamp
from paceline.data.db.index.index_file import read_index
from paceline.data.db.open_database import open_database
from paceline.data.db.write.writers import MiniDbWriter
from paceline.errors import DataError
from tests.harness.data.databases import RECORDS, check_records, items, label, write_minidb
from tests.harness.data.record_bytes import raw_datum


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A minidb as Caffe2 leaves it: a file of any name."""
    write_minidb(tmp_path, items())
    return (tmp_path / "data.minidb").rename(tmp_path / "train.db")


def begins() -> list[int]:
    """Where each record of `items()` begins, and where the last one ends."""
    at = [0]
    for name, value in items():
        at.append(at[-1] + 8 + len(name) + len(value))
    return at


def test_a_file_by_itself_is_a_database_with_its_index_beside_it(bare: Path) -> None:
    (bare.parent / "train.db.labels.txt").write_text("cat\ndog\n")
    for _ in range(2):
        with closing(open_database(bare, "minidb")) as source:
            check_records(source)
            assert source.label_names == ("cat", "dog")
            assert source.index_note is None
    assert sorted(path.name for path in bare.parent.iterdir()) == [
        "train.db",
        "train.db.labels.txt",
        "train.db.paceline.index",
    ]


def test_the_file_in_its_folder_is_the_folders_database(tmp_path: Path) -> None:
    write_minidb(tmp_path, items())
    (tmp_path / "labels.txt").write_text("cat\ndog\n")
    for path in (tmp_path / "data.minidb", tmp_path):
        with closing(open_database(path, "minidb")) as source:
            check_records(source)
            assert source.label_names == ("cat", "dog")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["data.minidb", "labels.txt", "paceline.index"]


def test_the_second_open_does_not_walk_the_file_again(tmp_path: Path) -> None:
    """Lengths in the middle, where no stamp reaches, are spoilt: only a walk would meet them."""
    value = items()[0][1]
    write_minidb(tmp_path, [*items(), (b"x", value + bytes(70_000)), (b"y", value)])
    middle = (tmp_path / "data.minidb").stat().st_size - 8 - 1 - len(value)
    write_minidb(tmp_path, [(b"z", value + bytes(70_000))])
    open_database(tmp_path, "minidb").close()
    with (tmp_path / "data.minidb").open("r+b") as file:
        file.seek(middle)
        file.write(b"\xff" * 8)
    with closing(open_database(tmp_path, "minidb")) as source:
        assert len(source) == RECORDS + 3
        assert source[7].label == label(7)
        with pytest.raises(DataError, match=r'record "y".*not in the database'):
            source[RECORDS + 1]
    (tmp_path / "paceline.index").unlink()
    with pytest.raises(DataError, match=f"damaged at byte {middle}"):
        open_database(tmp_path, "minidb")


@pytest.mark.parametrize("changed", [0, 2])
def test_an_index_is_dropped_when_the_first_or_last_record_of_a_large_file_has_changed(
    tmp_path: Path, changed: int
) -> None:
    value = items()[0][1]
    records = [(b"a", value), (b"b", value + bytes(200_000)), (b"c", value)]
    write_minidb(tmp_path / "old", records)
    open_database(tmp_path / "old", "minidb").close()
    records[changed] = (b"x", value)
    write_minidb(tmp_path / "new", records)
    index = tmp_path / "new/paceline.index"
    shutil.copy(tmp_path / "old/paceline.index", index)
    assert read_index(index, stamp(tmp_path / "old")) is not None
    assert read_index(index, stamp(tmp_path / "new")) is None


@pytest.mark.parametrize("cut", [3, 11, 300])
@pytest.mark.parametrize("record", [0, 5])
def test_a_torn_tail_is_an_error_that_names_its_byte(bare: Path, record: int, cut: int) -> None:
    os.truncate(bare, begins()[record] + min(cut, begins()[record + 1] - begins()[record] - 1))
    with pytest.raises(DataError, match=f"breaks off in the record at byte {begins()[record]}:"):
        open_database(bare, "minidb")


@pytest.mark.parametrize("lengths", [(0, 10), (-4, 10), (10, 0), (10, -1)])
def test_lengths_that_no_record_has_are_an_error_that_names_their_byte(
    bare: Path, lengths: tuple[int, int]
) -> None:
    with bare.open("r+b") as file:
        file.seek(begins()[5])
        file.write(struct.pack("<ii", *lengths))
    with pytest.raises(DataError, match=f"damaged at byte {begins()[5]}, or not a minidb"):
        open_database(bare, "minidb")


def test_a_file_that_shrinks_while_it_is_open_is_an_error_and_no_crash(bare: Path) -> None:
    with closing(open_database(bare, "minidb")) as source:
        os.truncate(bare, begins()[20] + 30)
        check_records(source, [19])
        with pytest.raises(DataError, match=f"byte {begins()[20]} ends too early"):
            source[20]
        with pytest.raises(DataError, match=r"00000030_cat.*not in the database"):
            source[30]


def test_records_of_one_key_are_all_there_in_the_files_order(tmp_path: Path) -> None:
    value = items()[0][1]
    others = [(b"same", raw_datum(_planes(), number)) for number in (3, 1, 2)]
    write_minidb(tmp_path, [(b"z", value), *others, (b"a", value)])
    for _ in range(2):
        with closing(open_database(tmp_path, "minidb")) as source:
            assert [source.stored(i)[0] for i in range(5)] == [
                b"a",
                b"same",
                b"same",
                b"same",
                b"z",
            ]
            assert [source[i].label for i in (1, 2, 3)] == [3, 1, 2]


def test_a_written_minidb_is_the_bytes_that_caffe2_writes(tmp_path: Path) -> None:
    write_minidb(tmp_path / "theirs", items())
    (tmp_path / "ours").mkdir()
    with closing(MiniDbWriter(tmp_path / "ours")) as writer:
        for name, value in items():
            writer.put(name, value)
        writer.finish()
        assert writer.offsets == begins()[:-1]
    files = [(tmp_path / name / "data.minidb").read_bytes() for name in ("ours", "theirs")]
    assert files[0] == files[1]


def _planes() -> np.ndarray:
    return np.zeros((3, 2, 2), np.uint8)
