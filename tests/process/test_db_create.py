"""`paceline db create` and `convert` as processes: killed, interrupted, out of space, mistyped."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import pytest

from tests.harness.data.databases import items, write_lmdb
from tests.harness.data.image_folder import file_of, put, ramp, some_images
from tests.harness.data.record_bytes import encoded_tensorprotos
from tests.harness.processes.fork_server import ServedPopen

LIMIT = 30
COMMAND = [sys.executable, "-m", "paceline.cli.main", "db"]


def run(*words: object) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, words)]
    process = ServedPopen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said, errors = process.communicate(timeout=LIMIT)
    return subprocess.CompletedProcess(command, process.returncode, said, errors)


@contextmanager
def in_the_middle(*words: object) -> Iterator[subprocess.Popen[str]]:
    """Start a command and give it once it has told of its first record."""
    with ServedPopen(
        [*COMMAND, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            assert re.match("(Writing|Converting): 1 of ", process.stderr.readline())
            yield process
        finally:
            process.kill()


@pytest.fixture
def much_work(tmp_path: Path) -> Path:
    """2,000 links to one large image: half a minute of decoding for whoever isn't stopped."""
    folder = tmp_path / "in"
    put(folder, "a/0.png", file_of(ramp(1000, 1000), "PNG"))
    for i in range(1, 2000):
        os.link(folder / "a/0.png", folder / f"a/{i}.png")
    return folder


@pytest.mark.parametrize("db_type", ["lmdb", "leveldb", "minidb"])
def test_a_killed_create_leaves_no_database_and_the_next_tidies_up(
    tmp_path: Path, much_work: Path, db_type: str
) -> None:
    dest = tmp_path / "db"
    with in_the_middle("create", much_work, dest, "--db_type", db_type) as process:
        process.kill()
        assert process.wait(LIMIT) == -signal.SIGKILL
    assert not dest.exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".db.creating", "in"]

    some_images(tmp_path / "few")
    again = run("create", tmp_path / "few", dest, "--db_type", db_type)
    assert (again.returncode, again.stdout) == (0, f"{dest}: 15 records in 3 classes.\n")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["db", "few", "in"]
    assert run("info", dest).returncode == 0


def test_a_killed_convert_leaves_no_database_and_the_next_tidies_up(tmp_path: Path) -> None:
    large = encoded_tensorprotos(file_of(ramp(1000, 1000), "PNG"), 0)
    write_lmdb(tmp_path / "old", [(b"%08d" % i, large) for i in range(500)])
    with in_the_middle("convert", tmp_path / "old", tmp_path / "new") as process:
        process.kill()
        assert process.wait(LIMIT) == -signal.SIGKILL
    assert sorted(p.name for p in tmp_path.iterdir()) == [".new.creating", "old"]

    write_lmdb(tmp_path / "few", items())
    again = run("convert", tmp_path / "few", tmp_path / "new", "--format", "tensorprotos")
    assert (again.returncode, again.stdout) == (0, f"{tmp_path}/new: 40 tensorprotos records.\n")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["few", "new", "old"]


def test_ctrl_c_ends_it_within_five_seconds_and_leaves_nothing(
    tmp_path: Path, much_work: Path
) -> None:
    with in_the_middle("create", much_work, tmp_path / "db") as process:
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=5)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_two_at_once_do_not_write_one_database(tmp_path: Path, much_work: Path) -> None:
    with in_the_middle("create", much_work, tmp_path / "db"):
        second = run("create", much_work, tmp_path / "db")
        assert second.returncode == 2
        assert "is being written by another process" in second.stderr
        assert (tmp_path / ".db.creating/db").is_dir()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("db_type", ["lmdb", "leveldb", "minidb"])
def test_a_full_disk_is_told_and_cleared(tmp_path: Path, tiny_disk: Path, db_type: str) -> None:
    for i in range(40):  # two megabytes of pixels
        put(tmp_path / "in", f"a/{i}.png", file_of(ramp(130, 130), "PNG"))
    result = run(
        "create", tmp_path / "in", tiny_disk / "db", "--encoding", "raw", "--db_type", db_type
    )
    assert result.returncode == 1
    assert "the disk is full; stopped after" in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tiny_disk.iterdir()) == []


def test_create_and_info_from_end_to_end(tmp_path: Path) -> None:
    some_images(tmp_path / "in", classes=2, each=4)
    dest = tmp_path / "db"
    created = run("create", tmp_path / "in", dest, "--shuffle-seed", "None")
    assert created.stdout == f"{dest}: 8 records in 2 classes.\n"
    assert created.stderr.splitlines()[0] == "Writing: 1 of 8 files"
    info = run("info", dest)
    assert info.returncode == 0
    lines = [" ".join(line.split()) for line in info.stdout.splitlines()]
    assert {"records 8", "format datum", "images 8 jpeg"} <= set(lines)
    assert "labels 2 distinct labels, 4 records per label" in lines
    assert any("class1" in line and "4" in line for line in lines)


def test_info_of_a_damaged_database_names_the_record_and_ends_with_status_1(
    tmp_path: Path,
) -> None:
    some_images(tmp_path / "in", classes=1, each=3)
    run("create", tmp_path / "in", tmp_path / "db", "--shuffle_seed", "None")
    database = lmdb.open(str(tmp_path / "db"), lock=False)
    with database, database.begin(write=True) as transaction:
        transaction.put(b"00000001_class0/1.jpg", b"junk")
    result = run("info", tmp_path / "db")
    assert result.returncode == 1
    assert "1 of 3 records are damaged; the first one:" in result.stdout
    assert "00000001_class0/1.jpg" in result.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["convert", "a"], "DEST"),
        (["convert", "missing", "b"], "missing: there is no such folder or file"),
        (["creat", "a", "b"], "did you mean create?"),
        (["create", "a", "b", "--db_typ", "lmdb"], "--db_type"),
        (["create", "missing", "b"], "missing isn't a folder"),
        (["create", "a", "b", "--resize", "0"], "--resize 0: must be at least 1"),
        (["info", "missing"], "missing: there is no such folder or file"),
        (["info", "/"], "is not a database"),
        ([], "usage: paceline db COMMAND"),
    ],
)
def test_mistakes_have_status_2_and_a_remedy(words: list[str], told: str) -> None:
    result = run(*words)
    assert result.returncode == 2
    assert told in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", ["create", "convert", "info"])
def test_help_has_examples(command: str) -> None:
    result = run(command, "--help")
    assert result.returncode == 0
    assert f"Examples:\n  paceline db {command} " in result.stdout


def test_the_command_does_not_load_torch() -> None:
    code = "import sys, paceline.cli.main, paceline.cli.db; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=LIMIT, check=False).returncode == 0
