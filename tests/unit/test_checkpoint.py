"""Checkpoints on disk: whole or not at all, the last few and the best kept, read by torch alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import CheckpointError
from paceline.state.checkpoint_files import Checkpoints, read_checkpoint


def state(value: float) -> dict[str, Any]:
    return {
        "model": {"weight": torch.full((3, 2), value)},
        "optimizer": {"state": {}, "param_groups": []},
        "position": {"epoch": 0, "step": 1, "number": 1, "sums": [0.5], "best": None},
    }


def test_torch_alone_reads_a_checkpoint(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path, keep=2).write(128, state(3.0))
    assert path == tmp_path / "checkpoints" / "step-00000128.pt"
    read = torch.load(path, weights_only=True)
    assert torch.equal(read["model"]["weight"], torch.full((3, 2), 3.0))
    assert read_checkpoint(path)["position"]["number"] == 1


def test_the_newest_are_kept_and_the_best_outlives_them(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (5, 10, 15, 20):
        checkpoints.write(step, state(float(step)), best=step == 10)
    assert [path.name for path in checkpoints.newest_first()] == [
        "step-00000020.pt",
        "step-00000015.pt",
    ]
    best = read_checkpoint(tmp_path / "checkpoints" / "best.pt")
    assert best["model"]["weight"][0, 0] == 10.0
    assert len(os.listdir(tmp_path / "checkpoints")) == 3


def test_a_better_one_takes_the_bests_place(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step in (5, 10):
        checkpoints.write(step, state(float(step)), best=True)
    best = read_checkpoint(tmp_path / "checkpoints" / "best.pt")
    assert best["model"]["weight"][0, 0] == 10.0


def test_steps_beyond_eight_digits_are_in_order_too(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (99_999_999, 100_000_000):
        checkpoints.write(step, state(1.0))
    assert checkpoints.newest_first()[0].name == "step-100000000.pt"


def test_the_newest_step_is_one_of_the_generations_lineage(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (5, 10):
        checkpoints.write(step, state(1.0))
    assert Checkpoints(tmp_path, keep=3).newest_step() == 10
    checkpoints.begin_generation(7)
    assert checkpoints.newest_step() == 5
    checkpoints.write(8, state(1.0))
    assert checkpoints.newest_step() == 8


def test_what_a_killed_writer_left_is_removed_and_never_read(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.write(5, state(1.0))
    (tmp_path / "checkpoints" / ".step-00000010.pt.part").write_bytes(b"half")
    assert len(checkpoints.newest_first()) == 1
    checkpoints.clean()
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000005.pt"]


@pytest.mark.parametrize("best", [False, True])
def test_a_file_is_on_the_disk_before_its_name_and_its_name_before_older_ones_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, best: bool
) -> None:
    """What a power cut leaves depends on the order of these calls alone."""
    folder, name = tmp_path / "checkpoints", "step-00000010.pt"
    first = "best.pt" if best else name
    checkpoints = Checkpoints(tmp_path, keep=1)
    old = checkpoints.write(5, state(1.0))
    calls: list[str] = []
    fsync, replace, unlink = os.fsync, Path.replace, Path.unlink

    def synced(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        whole = path == folder or read_checkpoint(path)["model"]["weight"][0, 0] == 2.0
        calls.append(f"sync {path.name}" if whole else "sync of a part")
        fsync(handle)

    def replaced(path: Path, name: Path) -> Path:
        calls.append(f"name {name.name}")
        return replace(path, name)

    def unlinked(path: Path, missing_ok: bool = False) -> None:
        if path == old:
            calls.append("remove the old one")
        unlink(path, missing_ok)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    monkeypatch.setattr(Path, "unlink", unlinked)
    checkpoints.write(10, state(2.0), best=best)
    names = [f"name {first}", f"name {name}"] if best else [f"name {name}"]
    written = calls.pop(0)
    assert written.startswith(f"sync .{first}.")
    synced_names = [call for name in names for call in (name, "sync checkpoints")]
    assert calls == [*synced_names, "remove the old one"]


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match=r"can't be written \(File exists\); make room"):
        Checkpoints(tmp_path, keep=2).write(5, state(1.0))


@pytest.mark.parametrize("cut", [1, 100, 1000])
def test_a_torn_checkpoint_is_named(tmp_path: Path, cut: int) -> None:
    path = Checkpoints(tmp_path, keep=2).write(5, state(1.0))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - cut)
    with pytest.raises(CheckpointError, match=r"step-00000005\.pt"):
        read_checkpoint(path)


def test_the_reason_that_a_torn_archive_gives_is_in_the_error(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path, keep=2).write(5, state(1.0))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 30)
    with pytest.raises(CheckpointError, match=r"missing or unreadable: File is not a zip file\)"):
        read_checkpoint(path)


def test_the_reason_that_a_damaged_member_gives_is_in_the_error(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path, keep=2).write(5, state(1.0))
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\x01\x02") + 8] |= 1  # a flag in the archive's directory
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"damaged \(File .* is encrypted, password required"):
        read_checkpoint(path)


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path, keep=2).write(5, state(1.0))
    data = bytearray(path.read_bytes())
    data[data.index(torch.full((3, 2), 1.0).numpy().tobytes())] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"step-00000005\.pt"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [({"weight": torch.ones(2)}, "no 'paceline'"), ([1, 2], "not a run's"), ({}, "not a run's")],
)
def test_something_else_is_told_from_a_checkpoint(
    tmp_path: Path, content: object, reason: str
) -> None:
    path = tmp_path / "x.pt"
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=reason):
        read_checkpoint(path)


def test_a_newer_format_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({**state(1.0), "paceline": 99}, path)
    with pytest.raises(CheckpointError, match=r"format 99.*update Paceline"):
        read_checkpoint(path)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*.pt"))


def test_files_beyond_a_generations_start_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    earlier = Checkpoints(tmp_path, keep=9)
    for step in (2, 4, 9):
        earlier.write(step, state(1.0))
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.begin_generation(6)
    checkpoints.write(7, state(1.0))
    assert names(tmp_path) == [f"step-{step:08}.pt" for step in (4, 7, 9)]
    checkpoints.write(8, state(1.0))
    assert names(tmp_path) == [f"step-{step:08}.pt" for step in (7, 8, 9)]


def test_files_of_a_part_stay_until_later_ones_have_all_parts(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2, part="stage0of2")
    for step in (1, 2, 3, 4, 5):
        checkpoints.write(step, state(1.0))
        checkpoints.complete_step = 3 if step == 4 else 0
    assert names(tmp_path) == [f"step-{step:08}.stage0of2.pt" for step in (2, 3, 4, 5)]


def test_a_file_of_an_ended_generation_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.write(4, state(1.0))
    plain = torch.save

    def save(*args: Any) -> None:
        checkpoints.begin_generation(5)  # meanwhile
        plain(*args)

    monkeypatch.setattr(torch, "save", save)
    checkpoints.write(8, state(1.0))
    assert names(tmp_path) == [f"step-{step:08}.pt" for step in (4, 8)]
