"""Files that appear complete and durable, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from paceline.atomic_write import (
    PARTS,
    atomic_file,
    explained_writes,
    link_atomically,
    write_atomically,
)
from paceline.errors import PacelineError


@pytest.mark.parametrize("content", ["naïve\n", b"\x00\xff"])
def test_a_file_has_its_new_content_and_nothing_is_left_beside_it(
    tmp_path: Path, content: str | bytes
) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    write_atomically(path, content)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert os.listdir(tmp_path) == ["file"]


def test_content_is_on_the_disk_before_its_name_and_the_name_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def synced(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        calls.append("folder" if path.is_dir() else path.read_text())
        fsync(handle)

    def replaced(path: Path, name: Path) -> Path:
        calls.append(f"name {name.name}")
        return replace(path, name)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    write_atomically(tmp_path / "file", "new")
    assert calls == ["new", "name file", "folder"]


def test_a_block_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), atomic_file(path) as file:
        file.write(b"%d" % (1 // 0))
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_full_disk_behind_torchs_own_error_is_the_error(tmp_path: Path) -> None:
    full = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115
    with pytest.raises(OSError, match="No space left"), full, atomic_file(tmp_path / "file"):
        torch.save({"weight": torch.zeros(9)}, full)
    assert os.listdir(tmp_path) == []


def test_writers_of_one_name_at_once_write_files_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with atomic_file(path) as one, atomic_file(path) as other:
        one.write(b"one")
        other.write(b"other")
        assert len(list(tmp_path.glob(PARTS))) == 2
    assert path.read_bytes() == b"one"


@pytest.mark.parametrize("links", [True, False])
def test_a_second_name_outlives_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("content")
    second.write_text("old")

    def refused(*_: object) -> None:
        raise PermissionError

    if not links:
        monkeypatch.setattr(os, "link", refused)
    link_atomically(first, second)
    first.unlink()
    assert second.read_text() == "content"
    assert os.listdir(tmp_path) == ["second"]


def test_a_write_that_fails_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "none" / "file"
    with (
        pytest.raises(PacelineError, match=r"none/file can't be written \(No such file.*make room"),
        explained_writes(path),
    ):
        write_atomically(path, "new")
