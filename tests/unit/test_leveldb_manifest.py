"""The tables that a MANIFEST names, against what LevelDB says of a database that it wrote."""

from __future__ import annotations

import re

import plyvel
import pytest

from paceline.data.db.database_files import leveldb_manifest
from paceline.data.db.leveldb.manifest import live_tables

BLOCK, HEADER = 32 << 10, 7  # LevelDB's doc/log_format.md: no piece begins in a block's last bytes


@pytest.fixture
def written(tmp_path):
    """A folder and LevelDB's own list of tables and sizes. Long keys make a MANIFEST of blocks."""
    database = plyvel.DB(str(tmp_path / "db"), create_if_missing=True, write_buffer_size=64 << 10)
    for i in range(400):
        database.put(b"%05d" % (i * 7919 % 400) + b"k" * 3000, bytes(1000))
    listed = ""
    for _ in range(20):  # a merge of LevelDB's own may still go on in the background
        before = listed
        database.compact_range()
        listed = database.get_property(b"leveldb.sstables").decode()
        if listed == before:
            break
    database.close()
    tables = re.findall(r"^ (\d+):(\d+)", listed, re.MULTILINE)
    return tmp_path / "db", {int(number): int(size) for number, size in tables}


def test_live_tables_are_those_that_leveldb_lists(written):
    folder, listed = written
    manifest = leveldb_manifest(folder).read_bytes()
    assert len(manifest) > 2 * (32 << 10)
    assert live_tables(manifest) == listed
    assert listed


def test_a_torn_last_edit_is_ignored(written):
    folder, listed = written
    manifest = leveldb_manifest(folder).read_bytes()
    left = -len(manifest) % BLOCK
    padding = bytes(left if left < HEADER else 0)
    torn = padding + bytes(4) + (100).to_bytes(2, "little") + b"\x01" + b"\x07half an edit"
    assert live_tables(manifest + torn) == listed


def test_what_is_no_manifest_is_an_error():
    edit = b"\x63\x01"  # tag 99
    with pytest.raises(ValueError, match="unknown tag 99"):
        live_tables(bytes(4) + len(edit).to_bytes(2, "little") + b"\x01" + edit)
    cut = b"\x02\x80"
    with pytest.raises(ValueError, match="cut off"):
        live_tables(bytes(4) + len(cut).to_bytes(2, "little") + b"\x01" + cut)
