"""Damaged pages of an LMDB: a sentence, and never the end of the process."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import lmdb
import pytest

from paceline.cli.main import main
from paceline.data.db.index.database_index import INDEX_NAME
from paceline.data.db.open_database import open_database
from paceline.errors import DataError
from tests.harness.data.record_bytes import encoded_tensorprotos

PAGE = 4096
RECORDS = 1500
FLAGS, LOWER, FIRST_NODE = 10, 12, 16
DAMAGES = {  # where in a page, and what is written there
    "no flags": (FLAGS, struct.pack("<H", 0)),
    "flags of another kind": (FLAGS, struct.pack("<H", 4)),
    "no keys": (LOWER, struct.pack("<H", 16)),
    "one key": (LOWER, struct.pack("<H", 18)),
    "more keys than fit": (LOWER, struct.pack("<H", 4090)),
    "zeros": (0, bytes(PAGE)),
    "noise": (0, b"\x9a\x5b\xe1" * 1365),
    "a node outside": (FIRST_NODE, b"\xff\xff"),
}


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """A database with two levels of branch pages."""
    path = tmp_path / "database"
    value = encoded_tensorprotos(b"\xff\xd8\xff" + bytes(200), 1)
    with lmdb.open(str(path), map_size=1 << 26) as environment:
        with environment.begin(write=True) as transaction:
            for i in range(RECORDS):
                transaction.put(b"%08d_%s" % (i, b"k" * 200), value, append=True)
        assert environment.stat()["psize"] == PAGE
        assert environment.stat()["depth"] == 3
    return path


def pages(database: Path, kind: int) -> list[int]:
    """List the pages of a kind that are in the tree."""
    content = (database / "data.mdb").read_bytes()
    return [
        number
        for number in range(2, len(content) // PAGE)
        if struct.unpack_from("<QHH", content, number * PAGE) == (number, 0, kind)
    ]


def damage(database: Path, page: int, name: str) -> None:
    at, content = DAMAGES[name]
    with (database / "data.mdb").open("r+b") as file:
        file.seek(page * PAGE + at)
        file.write(content)


def test_a_good_database_opens(database: Path) -> None:
    for _ in range(2):
        with closing(open_database(database)) as source:
            assert len(source) == RECORDS
            assert source[7].label == 1


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("which", [0, -1])
def test_a_damaged_branch_page_is_a_sentence_with_and_without_an_index(
    database: Path, name: str, which: int
) -> None:
    open_database(database).close()
    damage(database, pages(database, 1)[which], name)
    for _ in range(2):
        with pytest.raises(DataError, match=r"data.mdb is damaged \(page .*copy the database aga"):
            open_database(database)
        (database / INDEX_NAME).unlink(missing_ok=True)


@pytest.mark.parametrize("name", [name for name in DAMAGES if name != "one key"])
def test_a_damaged_leaf_page_is_a_sentence_when_keys_are_listed(database: Path, name: str) -> None:
    damage(database, pages(database, 2)[50], name)
    with pytest.raises(DataError, match=r"data.mdb is damaged \(page .*copy the database again"):
        open_database(database)


@pytest.mark.parametrize("length", [200, 9000])
def test_a_value_that_is_longer_than_its_place_is_a_sentence(tmp_path: Path, length: int) -> None:
    path = tmp_path / "database"
    value = encoded_tensorprotos(b"\xff\xd8\xff" + bytes(length), 1)
    with lmdb.open(str(path)) as environment, environment.begin(write=True) as transaction:
        for i in range(500):
            transaction.put(b"%08d" % i, value)
    open_database(path).close()
    page = pages(path, 2)[-2]  # beyond what the stamp of the index sees
    with (path / "data.mdb").open("r+b") as file:
        file.seek(page * PAGE + FIRST_NODE)
        (node,) = struct.unpack("<H", file.read(2))
        file.seek(page * PAGE + node + 2)
        file.write(struct.pack("<H", 205))  # the upper half of the length
    first = int((path / "data.mdb").read_bytes()[page * PAGE + node + 8 :][:8])
    with closing(open_database(path)) as source:
        assert source[first - 1].label == 1
        with pytest.raises(DataError, match=r"a value that goes beyond its place.*copy the data"):
            source[first]
    (path / INDEX_NAME).unlink()
    with pytest.raises(DataError, match=r"a value that goes beyond its place.*copy the database"):
        open_database(path)


@pytest.mark.parametrize("name", DAMAGES)
def test_with_an_index_a_damaged_leaf_page_costs_its_records_only(
    database: Path, name: str
) -> None:
    open_database(database).close()
    damage(database, pages(database, 2)[50], name)
    read = f"""
from contextlib import closing
from pathlib import Path
from paceline.data.db.open_database import open_database
from paceline.errors import DataError
bad = 0
with closing(open_database(Path({str(database)!r}))) as source:
    for i in range(len(source)):
        try:
            source[i]
        except DataError:
            bad += 1
print(bad)
"""
    done = subprocess.run(
        [sys.executable, "-c", read], capture_output=True, text=True, timeout=60, check=True
    )
    assert int(done.stdout) < 20


def test_info_ends_with_a_sentence(database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(database, pages(database, 1)[0], "one key")
    assert main(["db", "info", os.fspath(database)]) == 1
    assert "copy the database again" in capsys.readouterr().err
