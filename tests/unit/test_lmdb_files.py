"""LMDBs as other tools write them: one file, named databases, key lists beside the records."""

from __future__ import annotations

import pickle
from contextlib import closing
from pathlib import Path

import lmdb
import pytest

from paceline.cli.main import main
from paceline.data.db.database_files import kind_of
from paceline.data.db.open_database import open_database
from paceline.errors import ConfigError, DataError
from tests.harness.data.databases import RECORDS, check_records, items, write_lmdb


def one_file(path: Path, content: list[tuple[bytes, bytes]]) -> Path:
    environment = lmdb.open(str(path), subdir=False, map_size=1 << 26)
    with closing(environment), environment.begin(write=True) as transaction:
        for key, value in content:
            transaction.put(key, value)
    return path


@pytest.mark.parametrize("name", ["train.lmdb", "train_data.mdb", "train"])
def test_an_lmdb_of_one_file_opens_under_any_name(tmp_path: Path, name: str) -> None:
    path = one_file(tmp_path / name, items())
    assert kind_of(path) == "lmdb"
    for _ in range(2):  # the second time by its index
        with closing(open_database(path, "lmdb")) as source:
            check_records(source)
    assert (tmp_path / f"{name}.paceline.index").is_file()


def test_it_is_the_same_data_as_in_a_folder_and_its_index_follows_a_change(tmp_path: Path) -> None:
    path = one_file(tmp_path / "one.lmdb", items()[:-1])
    with closing(open_database(path)) as source:
        assert len(source) == RECORDS - 1
    one_file(path, items()[-1:])
    write_lmdb(tmp_path / "folder", items())
    with closing(open_database(path)) as one, closing(open_database(tmp_path / "folder")) as other:
        check_records(one)
        assert one.fingerprint == other.fingerprint


def test_it_opens_with_a_link_beside_itself_and_without_its_lock_file(tmp_path: Path) -> None:
    path = one_file(tmp_path / "one.lmdb", items())
    (tmp_path / "one.lmdb-lock").unlink()
    (tmp_path / "link").symlink_to(path)
    with closing(open_database(path)) as one, closing(open_database(tmp_path / "link")) as two:
        check_records(one)
        check_records(two)


def test_commands_read_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = one_file(tmp_path / "one.lmdb", items())
    assert main(["db", "info", str(path)]) == 0
    said = "".join(capsys.readouterr().out.split())  # a narrow table breaks a long path
    assert f"{path}(lmdb)" in said
    assert main(["db", "convert", str(path), str(tmp_path / "new")]) == 0
    with closing(open_database(tmp_path / "new")) as source:
        check_records(source)


def test_it_is_no_minidb_and_no_leveldb(tmp_path: Path) -> None:
    path = one_file(tmp_path / "one.lmdb", items())
    for kind in ("minidb", "leveldb"):
        with pytest.raises(ConfigError, match=f"type is lmdb, not {kind}; give --db_type lmdb"):
            open_database(path, kind)  # type: ignore[arg-type]


def test_an_incomplete_copy_of_one_file_is_told(tmp_path: Path) -> None:
    path = one_file(tmp_path / "one.lmdb", items())
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match=r"one\.lmdb has .* bytes: the copy is incomplete"):
        open_database(path)


@pytest.mark.parametrize("subdir", [True, False])
@pytest.mark.parametrize("beside", [0, 3])  # records in the main database
def test_named_databases_are_told_as_what_they_are(
    tmp_path: Path, subdir: bool, beside: int
) -> None:
    path = tmp_path / "db"
    environment = lmdb.open(str(path), subdir=subdir, map_size=1 << 26, max_dbs=2)
    with closing(environment):
        named = [environment.open_db(name) for name in (b"test", b"train")]
        with environment.begin(write=True) as transaction:
            for key, value in items():
                transaction.put(key, value, db=named[1])
            for key, value in items()[:beside]:
                transaction.put(key, value)
    with pytest.raises(DataError, match=r'contains named databases \("test", "train"\), but'):
        open_database(path)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_key_list_among_the_records_is_told_as_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], protocol: int
) -> None:
    keys = [key for key, _ in items()]
    extra = {
        b"__keys__": pickle.dumps(keys, protocol),
        b"__len__": pickle.dumps(len(keys), protocol),
        b"num-samples": b"40",
    }
    write_lmdb(tmp_path / "db", [*items(), *extra.items()])
    assert main(["db", "info", str(tmp_path / "db")]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert '"__keys__"' in shown
    assert "neither a TensorProtos nor a Datum record but a pickled list, such as the list" in shown
    words = ["db", "convert", str(tmp_path / "db"), str(tmp_path / "new"), "--skip_damaged"]
    assert main(words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "a pickled number, such as the count" in shown
    assert "the number 40, such as the count" in shown
    with closing(open_database(tmp_path / "new")) as source:
        check_records(source)


def test_a_database_of_pickled_samples_is_told_at_once(tmp_path: Path) -> None:
    samples = [(b"%d" % i, pickle.dumps((b"\xff\xd8\xff", i))) for i in range(5)]
    write_lmdb(tmp_path / "db", [*samples, (b"__keys__", pickle.dumps([b"0"]))])
    with pytest.raises(DataError, match=r'record "0" .* but a pickled object of Python: write the'):
        open_database(tmp_path / "db")
