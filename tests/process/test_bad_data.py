"""Databases that are missing, torn, damaged, of another kind, or of other classes."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

import lmdb
import pytest

from paceline.cli.main import main
from paceline.data.db.formats.record_formats import decode_record, encode_record
from tests.harness.data.databases import write_lmdb
from tests.harness.data.image_folder import put, some_images
from tests.harness.data.permissions import closed
from tests.harness.processes.bad_inputs import (
    RANK_PREFIX,
    TRAIN,
    Bad,
    require_answer,
    require_run_answer,
    write_model,
)
from tests.harness.processes.run_folders import events

WORDS = TRAIN + "--model own:net --train_data "
NO_RECORD = (
    "its 4 bytes are neither a TensorProtos nor a Datum record: the record is damaged, or this is "
    "not an image database; create it again."
)
AT_ONCE = {
    "missing": Bad(
        command=WORDS + "missing",
        message="--train_data missing: there is no such database; check the path.",
    ),
    "no path": Bad(
        command=WORDS.rstrip() + "=",
        message="--train_data '': there is no such database; check the path.",
    ),
    "missing test": Bad(
        command=WORDS + "whole --test_data missing",
        message="--test_data missing: there is no such database; check the path.",
    ),
    "a file": Bad(
        command=WORDS + "own.py",
        message="own.py is a file, and not one of an LMDB: give the path of the lmdb database, or "
        "--db_type minidb if the file is a minidb.",
    ),
    "a folder of images": Bad(
        command=WORDS + "images",
        message=r"images is not a database: it has none of data.mdb \(lmdb\), CURRENT \(leveldb\), "
        r"data.minidb \(minidb\); check the path.",
    ),
    "another kind": Bad(
        command=WORDS + "whole --db_type leveldb",
        message="whole: the database type is lmdb, not leveldb; give --db_type lmdb.",
    ),
    "empty": Bad(
        command=WORDS + "empty", message="empty holds no records; create it again.", status=1
    ),
    "torn lmdb": Bad(
        command=WORDS + "torn-lmdb",
        message=r"torn-lmdb/data.mdb has \d+ of \d+ bytes: the copy is incomplete; copy the "
        "database again.",
        status=1,
    ),
    "torn leveldb": Bad(
        command=WORDS + "torn-leveldb --db_type leveldb",
        message=r"\S+torn-leveldb/\d+.ldb has \d+ of \d+ bytes: the copy is incomplete; copy the "
        "database again.",
        status=1,
    ),
    "torn minidb": Bad(
        command=WORDS + "torn-minidb --db_type minidb",
        message=r"torn-minidb/data.minidb breaks off in the record at byte \d+: the copy is "
        r"incomplete \(or this is not a minidb\); copy it again.",
        status=1,
    ),
    "nothing but garbage": Bad(
        command=WORDS + "garbage --bad_records skip",
        message=rf'record "00000000_class\d/\d.jpg" of garbage: {NO_RECORD}',
        status=1,
    ),
    "labels beyond": Bad(
        command=WORDS + "whole --num_labels 2",
        message="--num_labels 2: whole has labels up to 2; give at least 3.",
    ),
    "other classes": Bad(
        command=WORDS + "whole --test_data other",
        message="--test_data other: its classes class0, class1 differ from those of the training "
        "data, class0, class1, class2; create both databases from folders with the same classes.",
    ),
    "too few": Bad(
        command=WORDS + "whole --num_workers 30",
        message="--train_data whole: 15 samples for 30 workers; at least one sample per worker is "
        "needed.",
    ),
    "create of no classes": Bad(
        command="db create images/class0 made",
        message="images/class0 has no subfolders: put the images of each class in "
        "images/class0/<class>.",
    ),
    "create of parts": Bad(
        command="db create parts made",
        message="parts has test/ and train/, each of which contains class folders: create one "
        "database from each, beginning with parts/train; or rename what is a class.",
    ),
    "create of nothing": Bad(
        command="db create missing made",
        message="missing isn't a folder: give a folder that contains class folders.",
    ),
    "create onto a database": Bad(
        command="db create images whole",
        message="whole isn't empty: give another name, or remove it first.",
    ),
    "create of a damaged image": Bad(
        command="db create broken made",
        message=r"broken/dog/2.jpg is a damaged image: .*\. Repair or remove it, or give "
        "--skip_damaged.",
        status=1,
    ),
    "convert onto a database": Bad(
        command="db convert whole other",
        message="other isn't empty: give another name, or remove it first.",
    ),
    "convert of a torn one": Bad(
        command="db convert torn-lmdb made",
        message=r"torn-lmdb/data.mdb has \d+ of \d+ bytes: the copy is incomplete; copy the "
        "database again.",
        status=1,
    ),
    "info of a file inside": Bad(
        command="db info whole/data.mdb",
        message="whole/data.mdb is one file of a database: give the folder whole instead.",
    ),
    "training on a file inside": Bad(
        command=WORDS + "torn-leveldb/CURRENT --db_type leveldb",
        message="torn-leveldb/CURRENT is one file of a database: give the folder torn-leveldb "
        "instead.",
    ),
    "info of nothing": Bad(
        command="db info missing",
        message="missing: there is no such folder or file; check the path.",
    ),
}
KEY = r'record "00000007_class\d/\d.jpg" of '
REMEDIES = " Use --bad_records skip to leave out such records, or `paceline db info` to find them."
LATER = {
    "one-garbage": f"{KEY}one-garbage: {NO_RECORD}",
    "cut": f"{KEY}cut can't be decoded: Premature end of JPEG file.",
    "mixed": f"{KEY}mixed: it is a TensorProtos in a database of Datum records, but a database has "
    "only one format: create the database again from one source.",
    "label-9": f"{KEY}label-9 has the label 9, but with --num_labels 3, labels must be 0 to 2: "
    "change --num_labels, or create the database again.",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all these databases."""
    folder = tmp_path_factory.mktemp("made")
    some_images(folder / "images", classes=3, each=5, size=32)
    some_images(folder / "few", classes=2, each=1, size=32)
    for part in ("train", "test"):
        some_images(folder / "parts" / part, classes=2, each=1, size=32)
    for source, name, kind in (
        ("images", "whole", "lmdb"),
        ("few", "other", "lmdb"),
        ("images", "torn-leveldb", "leveldb"),
        ("images", "torn-minidb", "minidb"),
    ):
        places = [str(folder / source), str(folder / name)]
        assert main(["db", "create", *places, "--db_type", kind]) == 0
    put(folder, "broken/dog/2.jpg", (folder / "few/class0/0.jpg").read_bytes()[:200])
    write_lmdb(folder / "empty", [])
    shutil.copytree(folder / "whole", folder / "torn-lmdb")
    tear(folder / "torn-lmdb", "data.mdb")
    (folder / "torn-minidb/paceline.index").unlink(missing_ok=True)
    tear(folder / "torn-minidb", "data.minidb")
    tear(folder / "torn-leveldb", "*.ldb")
    break_records(folder)
    return folder


def tear(database: Path, pattern: str) -> None:
    """Cut the end off a database's file, as a copy that was broken off leaves it."""
    (file,) = database.glob(pattern)
    os.truncate(file, file.stat().st_size // 2)


def break_records(folder: Path) -> None:
    """Write copies of the whole database of which the eighth record is changed, or each."""
    with lmdb.open(str(folder / "whole"), readonly=True, lock=False) as good, good.begin() as t:
        items = list(t.cursor())
    key, value = items[7]
    record, _ = decode_record(value)
    assert isinstance(record.image, bytes)
    changes = {
        "one-garbage": b"\x08\x01\x10\x01",
        "cut": encode_record(record.image[:-50], record.label, "datum"),
        "mixed": encode_record(record.image, record.label, "tensorprotos"),
        "label-9": encode_record(record.image, 9, "datum"),
    }
    for name, changed in changes.items():
        write_lmdb(folder / name, [*items[:7], (key, changed), *items[8:]])
    write_lmdb(folder / "garbage", [(key, changes["one-garbage"]) for key, _ in items])


@pytest.fixture
def here(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return write_model(made, monkeypatch)


@pytest.mark.parametrize("name", AT_ONCE)
def test_data_that_cant_be_had_are_refused_before_anything_is_written(
    name: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    require_answer(AT_ONCE[name], here, capfd)


@pytest.mark.parametrize("name", LATER)
def test_a_record_that_only_a_worker_reads_ends_the_run(
    name: str, here: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = f"{WORDS}{name} --num_workers 2 --output_dir {tmp_path}"
    message = RANK_PREFIX + LATER[name] + REMEDIES
    require_answer(Bad(command=words, message=message, status=1, writes=True), here, capfd)


def test_a_truncated_jpeg_can_be_left_out(here: Path, tmp_path: Path) -> None:
    words = f"{WORDS}cut --run_id r --output_dir {tmp_path} --bad_records skip"
    assert main(shlex.split(words)) == 0
    steps = [event for event in events(tmp_path / "r") if event["event"] == "step"]
    assert sum(step["last"] - step["first"] for step in steps) == 15
    assert sum(step["skipped"] for step in steps) == 1


def test_a_database_that_may_not_be_read_names_who_can_help(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hidden = here / "closed"
    shutil.copytree(here / "whole", hidden)
    bad = Bad(
        command=WORDS + "closed",
        message="closed: you have no permission to read it; ask its owner.",
    )
    try:
        with closed(hidden):
            require_answer(bad, here / "images", capfd)
    finally:
        shutil.rmtree(hidden)


def test_the_real_command_refuses_a_missing_database(here: Path) -> None:
    require_run_answer(AT_ONCE["missing"], here)
