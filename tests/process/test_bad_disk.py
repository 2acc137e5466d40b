"""Disks that are full, folders that can't be written: nothing that was there is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.state.checkpoint_files import read_checkpoint
from tests.harness.data.image_folder import some_images
from tests.harness.data.permissions import read_only
from tests.harness.data.small_disk import small_disk
from tests.harness.processes.bad_inputs import (
    NET,
    NULL,
    RANK_PREFIX,
    Bad,
    contents,
    require_answer,
    require_message,
    write_model,
)
from tests.harness.processes.command import run
from tests.harness.processes.run_folders import events

FAT = (
    NET
    + '''

def fat(num_labels):
    """A net whose checkpoints have 1.2 MB."""
    return nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, 3000), net_of(num_labels))


def net_of(num_labels):
    return nn.Linear(3000, num_labels)
'''
)
FULL = r"\(No space left on device\)"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return write_model(tmp_path, monkeypatch, FAT)


def test_a_full_disk_keeps_the_checkpoints_and_the_run_goes_on_once_there_is_room(
    here: Path,
) -> None:
    # The checkpoint after step 9 fails in the background; the one after step 12 waits for it.
    words = f"{NULL} --epoch_size 52 --model own:fat --run_id r --output_dir disk"
    words += " --checkpoint_steps 3 --keep_checkpoints 9"
    with small_disk(here / "disk", "3m") as disk:
        message = (
            RANK_PREFIX
            + rf"disk/r/checkpoints/step-00000009.pt: the checkpoint can't be written {FULL}; "
            "make room, or give another --output_dir. Earlier checkpoints are unchanged."
        )
        require_message(run(*words.split(), folder=here), 1, message)
        files = sorted((disk.path / "r/checkpoints").iterdir())
        assert [file.name for file in files] == ["step-00000003.pt", "step-00000006.pt"]
        assert [read_checkpoint(file)["position"]["number"] for file in files] == [3, 6]

        disk.make_room()
        ended = run(*words.split(), folder=here)
        assert ended.status == 0, ended.text
        assert "Resuming from disk/r/checkpoints/step-00000006.pt" in ended.text
        assert main(["ledger", "disk/r"]) == 0


def test_a_full_disk_for_the_events_is_told_and_the_ledger_is_exact_in_the_end(
    here: Path,
) -> None:
    words = f"{NULL} --epoch_size 200 --batch_size 1 --model own:net --run_id r --output_dir disk"
    with small_disk(here / "disk", "1m") as disk:
        disk.fill(leave=32 << 10)
        message = (
            RANK_PREFIX
            + rf"disk/r/events.\w+-0.jsonl can't be written {FULL}: make room, or give another "
            "--output_dir."
        )
        require_message(run(*words.split(), folder=here), 1, message)
        disk.make_room()
        ended = run(*words.split(), folder=here)
        assert ended.status == 0, ended.text
        assert main(["ledger", "disk/r"]) == 0


def test_a_disk_without_room_for_a_run_is_refused(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with small_disk(here / "disk", "1m") as disk:
        (disk.path / "r").mkdir()
        disk.fill(leave=0)
        message = f"disk/r can't be written {FULL}: make room, or give another --output_dir."
        words = f"{NULL} --model own:net --run_id r --output_dir disk"
        require_answer(Bad(command=words, message=message, status=1), here, capfd)


def test_a_database_for_which_the_disk_is_too_small_leaves_nothing(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    some_images(here / "images", classes=2, each=9, size=64)
    with small_disk(here / "disk", "16k"):
        message = (
            r"disk/made: the disk is full; stopped after \d+ records and nothing was left there. "
            "Free space or choose another disk."
        )
        for kind in ("lmdb", "leveldb", "minidb"):
            words = f"db create images disk/made --db_type {kind}"
            require_answer(Bad(command=words, message=message, status=1), here, capfd)


@pytest.mark.parametrize(
    ("folder", "reason"),
    [("own.py", "Not a directory"), ("/proc/none", "No such file or directory")],
)
def test_an_output_folder_that_cant_be_written_is_refused(
    folder: str, reason: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    message = (
        rf"--output_dir: {folder}/r can't be written \({reason}\); give a folder where you may "
    )
    words = f"{NULL} --model own:net --run_id r --output_dir {folder}"
    require_answer(Bad(command=words, message=message + "write."), here, capfd)


def test_an_output_folder_of_somebody_else_is_refused(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "theirs").mkdir()
    message = (
        r"--output_dir: theirs/r can't be written \(Permission denied\); give a folder where you "
        "may write."
    )
    with read_only(here / "theirs"):
        words = f"{NULL} --model own:net --run_id r --output_dir theirs"
        require_answer(Bad(command=words, message=message), here, capfd)


def test_a_run_whose_checkpoints_may_not_be_written_ends_with_its_files_as_they_were(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "runs/r").mkdir(parents=True)
    (here / "runs/r/checkpoints").write_text("a file where a folder should be")
    before = contents(here / "runs/r/checkpoints")
    message = (
        RANK_PREFIX + r"runs/r/checkpoints/step-00000002.pt: the checkpoint can't be written "
        r"\((File exists|Not a directory)\); make room, or give another --output_dir. Earlier "
        "checkpoints are unchanged."
    )
    words = f"{NULL} --model own:net --run_id r"
    require_answer(Bad(command=words, message=message, status=1, writes=True), here, capfd)
    assert contents(here / "runs/r/checkpoints") == before
    assert [event["step"] for event in events(here / "runs/r") if event["event"] == "step"] == [
        0,
        1,
    ]
