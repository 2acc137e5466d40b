"""A LevelDB with damaged blocks: no record is lost without a word."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import plyvel
import pytest

from paceline.data.db.open_database import open_database
from paceline.errors import DataError
from tests.harness.data.databases import RECORDS, check_records, items


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """The one table of a LevelDB: 4,000 bytes in blocks of half a kilobyte."""
    with plyvel.DB(
        str(tmp_path / "data"), create_if_missing=True, block_size=512, compression=None
    ) as database:
        for key, value in items():
            database.put(key, value)
        database.compact_range()
    (table,) = (tmp_path / "data").glob("*.ldb")
    return table


@pytest.mark.parametrize("at", range(100, 3900, 400))
def test_a_damaged_block_is_found_when_the_keys_are_listed(table: Path, at: int) -> None:
    """LevelDB itself ends its walk at damaged last blocks as if nothing had been there."""
    flip(table, at)
    with pytest.raises(DataError, match=r"can't be listed \(Corruption: .*copy it again"):
        open_database(table.parent, "leveldb")


def test_with_an_index_only_the_damaged_records_are_errors(table: Path) -> None:
    open_database(table.parent, "leveldb").close()
    flip(table, 1700)
    said = {}
    with closing(open_database(table.parent, "leveldb")) as source:
        for i in range(RECORDS):
            try:
                check_records(source, [i])
            except DataError as error:
                said[i] = str(error)
    assert 3 < len(said) < 20
    for i, text in said.items():
        assert text.startswith(f'record "{i:08}_cat/{i}.jpg" of ')
        assert "LevelDB can't read it (Corruption: block checksum mismatch" in text


def flip(table: Path, at: int) -> None:
    content = bytearray(table.read_bytes())
    content[at] ^= 0xFF
    table.write_bytes(content)
