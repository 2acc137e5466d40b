"""Lines on a disk that is full: they wait for room, and none is torn by another."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path

import pytest

from paceline.errors import PacelineError, PeerLost
from paceline.observe import line_file
from paceline.observe.line_file import LineFile
from tests.harness.data.small_disk import small_disk

LONG = "x" * 10_000  # more than two pages, so that a part of it is written


def test_a_line_waits_until_a_failed_checkpoint_frees_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        lines = LineFile(disk.path / "lines")
        lines.write("first")
        disk.fill(leave=4096)
        waits: list[float] = []

        def sleep(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 3:
                disk.make_room()

        monkeypatch.setattr(time, "sleep", sleep)
        lines.write(LONG)
        lines.close()
        assert len(waits) == 3
        assert lines.path.read_text() == f"first\n{LONG}\n"


def test_on_a_full_disk_one_line_waits_and_what_is_unwritten_comes_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        lines = LineFile(disk.path / "lines")
        disk.fill(leave=4096)
        waits: list[float] = []
        monkeypatch.setattr(time, "sleep", waits.append)
        monkeypatch.setattr(line_file, "_ROOM_LIMIT_S", 0.05)
        with pytest.raises(PacelineError, match="No space left"):
            lines.write(LONG)
        before = len(waits)
        assert before > 0
        with pytest.raises(PacelineError, match="No space left"):
            lines.write("second")
        assert len(waits) == before
        assert lines.path.read_text() == LONG[:4096]  # a part of a line, which readers ignore
        disk.make_room()
        lines.write("third")
        lines.close()
        assert lines.path.read_text() == f"{LONG}\nsecond\nthird\n"


def test_another_error_than_a_full_disk_is_raised_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def write(self, data: bytes) -> int:
            raise OSError(errno.EIO, "Input/output error")

    lines = LineFile(tmp_path / "lines")
    lines.close()
    monkeypatch.setattr(lines, "_file", Broken())
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waited"))
    with pytest.raises(PacelineError, match="Input/output error"):
        lines.write("first")


def test_a_line_that_was_not_to_be_written_any_more_is_taken_back(tmp_path: Path) -> None:
    lines = LineFile(tmp_path / "lines")
    lines.write("first")
    before = lines.path.stat()
    answers = [None, PeerLost("outside")]

    def require() -> None:
        if (error := answers.pop(0)) is not None:
            assert lines.path.read_text() == "first\nsecond\n"
            raise error

    with pytest.raises(PeerLost):
        lines.write("second", require)
    assert lines.path.read_text() == "first\n"
    assert lines.path.stat().st_mtime_ns == before.st_mtime_ns
    lines.write("third", lambda: None)
    lines.close()
    assert lines.path.read_text() == "first\nthird\n"


def test_only_the_line_is_taken_back_where_an_earlier_one_came_with_it(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        lines = LineFile(disk.path / "lines")
        disk.fill(leave=4096)
        with pytest.raises(PacelineError, match="No space left"):
            lines.write(LONG)
        disk.make_room()
        answers = [None, PeerLost("outside")]

        def require() -> None:
            if (error := answers.pop(0)) is not None:
                raise error

        with pytest.raises(PeerLost):
            lines.write("second", require)
        lines.close()
        assert lines.path.read_text() == f"{LONG}\n"


def test_lines_of_several_threads_are_whole(tmp_path: Path) -> None:
    lines = LineFile(tmp_path / "lines")

    def write(name: str) -> None:
        for number in range(50):
            lines.write(f"{name}{number} {name * 100}")
            time.sleep(0)

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines.close()
    expected = {f"{name}{number} {name * 100}" for name in "abcd" for number in range(50)}
    found = lines.path.read_text().splitlines()
    assert len(found) == 200
    assert set(found) == expected
