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
from tests.harness.membership.given_membership import GivenMembership

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


class Check:
    """A member's lease that ends before some looks at it, and is renewed until it is `out`."""

    def __init__(self, *lasts: bool, out: bool) -> None:
        self._lasts, self._out = list(lasts), out
        self.looks: list[str] = []

    def require(self) -> None:
        self.looks.append("require")
        if self._out and not self._lasts:
            raise PeerLost("outside")

    def lasts(self) -> bool:
        self.looks.append("lasts")
        return self._lasts.pop(0)

    @property
    def membership(self) -> GivenMembership:
        return GivenMembership(require_member=self.require, lease_lasts=self.lasts)


def test_a_line_is_written_once_the_lease_lasts_when_it_is_written(tmp_path: Path) -> None:
    lines = LineFile(tmp_path / "lines")
    check = Check(False, False, True, out=False)
    lines.write("first", check.membership)
    assert check.looks == ["require", "lasts"] * 3
    assert lines.path.read_text() == "first\n"
    lines.close()


def test_a_process_whose_lease_ended_before_the_write_and_that_is_outside_writes_no_line(
    tmp_path: Path,
) -> None:
    lines = LineFile(tmp_path / "lines")
    check = Check(False, out=True)
    with pytest.raises(PeerLost):
        lines.write("first", check.membership)
    assert check.looks == ["require", "lasts", "require"]
    lines.write("last")  # a losing side's
    lines.close()
    assert lines.path.read_text() == "last\n"


def test_a_line_that_was_begun_on_a_full_disk_is_completed_outside_of_the_world_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        lines = LineFile(disk.path / "lines")
        disk.fill(leave=4096)
        monkeypatch.setattr(time, "sleep", lambda seconds: disk.make_room())
        lines.write(LONG, Check(True, out=True).membership)  # no further look
        lines.close()
        assert lines.path.read_text() == f"{LONG}\n"


def test_a_line_that_waits_for_room_is_not_written_by_a_process_that_is_outside_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        lines = LineFile(disk.path / "lines")
        disk.fill(leave=0)
        monkeypatch.setattr(time, "sleep", lambda seconds: disk.make_room())
        with pytest.raises(PeerLost):
            lines.write("first", Check(True, False, out=True).membership)
        lines.close()
        assert lines.path.read_text() == ""


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
