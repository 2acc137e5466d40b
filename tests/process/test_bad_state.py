"""Checkpoints, logs and configurations of a run that are torn, foreign, missing, or another's."""

from __future__ import annotations

import os
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.cli.main import main
from tests.harness.data.image_folder import some_images
from tests.harness.processes.bad_inputs import (
    LIMIT,
    NET,
    NULL,
    RANK_PREFIX,
    Bad,
    no_process_left,
    require_answer,
    require_run_answer,
    write_model,
)
from tests.harness.processes.command import Command, run
from tests.harness.processes.run_folders import event_files, events, losses

WORDS = f"{NULL} --model own:net --epoch_size 16 --run_id r --checkpoint_steps 1"
WORDS += " --keep_checkpoints 3"
RUN = "runs/r/"
NEWEST = RUN + "checkpoints/step-00000003.pt"
TORN = rf"{NEWEST}: torn or damaged \(.*\); use another file, or a fresh copy of this one."


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of four steps that looks as if it had been killed in the last one."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "own.py").write_text(NET)
    with no_process_left() as environment:
        ended = Command(*WORDS.split(), folder=folder, environment=environment).wait(LIMIT)
    assert ended.status == 0, ended.text
    for name in ("finished", "checkpoints/step-00000004.pt", "net_model.pt"):
        (folder / RUN / name).unlink()
    return folder


@pytest.fixture
def here(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    shutil.copytree(trained, folder)
    return write_model(folder, monkeypatch)


def tear(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def test_a_torn_checkpoint_is_named_and_the_one_before_it_used(here: Path) -> None:
    tear(here / NEWEST)
    before = losses(here / RUN)
    ended = run(*WORDS.split(), folder=here)
    assert ended.status == 0, ended.text
    message = ended.text
    assert f"{NEWEST}: torn or damaged (" in message
    assert f"Resuming from {RUN}checkpoints/step-00000002.pt: epoch 1, 2 steps done." in message
    assert "Traceback" not in message
    told = losses(here / RUN)
    assert told[2] == before[2] * 2  # step 2 was trained again, and to the same loss
    assert main(["ledger", "r"]) == 0


def test_a_checkpoint_of_another_run_is_named_and_the_one_before_it_used(here: Path) -> None:
    state = torch.load(here / NEWEST, weights_only=True)
    torch.save({**state, "config": {**state["config"], "seed": 5}}, here / NEWEST)
    ended = run(*WORDS.split(), folder=here)
    assert ended.status == 0, ended.text
    message = ended.text
    assert f"{NEWEST}: this checkpoint belongs to another run and is skipped." in message
    assert "step-00000002.pt: epoch 1, 2 steps done." in message


def test_without_a_good_checkpoint_the_run_doesnt_begin_anew_by_itself(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    files = sorted((here / RUN / "checkpoints").glob("step-*.pt"))
    for file in files:
        tear(file)
    lines = events(here / RUN)
    message = (
        RANK_PREFIX
        + TORN
        + r" No checkpoint of run r \(2 found\) can be used: use another --run_id, or "
        "delete the checkpoints to restart the run."
    )
    require_answer(Bad(command=WORDS, message=message, status=1), here, capfd)
    assert events(here / RUN) == lines


def made_with(checkpoint: str, now: str) -> str:
    return (
        f"{checkpoint} was written with 16 images, 16 per epoch and 4 per step, but this run has "
        f"{now}. Use the same data and flags, or start a new run from its weights with "
        "--weights."
    )


REFUSED = {
    "other flags": Bad(
        command=WORDS + " --seed 1 --momentum 0.5",
        message="--run_id r: this run was started with --seed 0, but --seed is now 1; "
        "restore the former value, or give another --run_id.",
    ),
    "other batches": Bad(
        command=WORDS + " --batch_size 8",
        message="--run_id r: this run was started with --batch_size 4, but --batch_size is now 8; "
        "restore the former value, or give another --run_id.",
    ),
    "other epochs": Bad(
        command=WORDS + " --epoch_size 8",
        message="--run_id r: this run was started with --epoch_size 16, but --epoch_size is now 8; "
        "restore the former value, or give another --run_id.",
    ),
    "resume no": Bad(
        command=WORDS + " --resume no",
        message="--resume no: run r already exists; give another --run_id, or remove runs/r.",
    ),
    "resume missing": Bad(
        command=WORDS + " --run_id new --resume nowhere.pt",
        message="--resume nowhere.pt: there is no such file; give 'auto', 'no', or the path of a "
        "checkpoint.",
    ),
    "resume with other batches": Bad(
        command=WORDS + f" --run_id new --batch_size 8 --resume {NEWEST}",
        message=made_with(NEWEST, "16 images, 16 per epoch and 8 per step"),
    ),
    "resume with other epochs": Bad(
        command=WORDS + f" --run_id new --epoch_size 8 --resume {NEWEST}",
        message=made_with(NEWEST, "8 images, 8 per epoch and 4 per step"),
    ),
    "resume garbage": Bad(
        command=WORDS + " --run_id new --resume own.py",
        message="own.py: not a file of weights; give one that a run, torch.save, safetensors "
        "or Caffe2 wrote.",
        status=1,
    ),
    "ledger of nothing": Bad(
        command="ledger nowhere",
        message=r"nowhere is neither a run folder \(with files events.<member>.jsonl\) nor the id "
        "of a run in --output_dir runs, which has r; check the path.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_run_that_is_another_isnt_touched(
    name: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    require_answer(REFUSED[name], here, capfd)


def configuration(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / RUN / "config.toml").read_text())


def test_an_edited_value_of_a_start_that_is_refused_is_not_recorded(here: Path) -> None:
    (here / "own.py").write_text(NET.replace("48, num_labels", "48, 5"))
    ended = run(*WORDS.split(), "--momentum", "0.5", folder=here)
    assert ended.status == 2, ended.text
    assert "the checkpoint's model doesn't fit" in ended.text
    assert configuration(here)["momentum"] == 0.9


def test_a_run_that_has_trained_no_step_takes_edited_values_as_its_own(here: Path) -> None:
    text = (here / RUN / "config.toml").read_text()
    shutil.rmtree(here / RUN)
    (here / RUN).mkdir()
    (here / RUN / "config.toml").write_text(text)
    ended = run(*WORDS.split(), "--momentum", "0.5", folder=here)
    assert ended.status == 0, ended.text
    assert "replaces" not in ended.text
    assert configuration(here)["momentum"] == 0.5


def test_a_run_doesnt_go_on_with_other_data(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    some_images(here / "images", each=4)
    assert main(["db", "create", "images", "few"]) == 0
    tear(here / NEWEST)
    before = RUN + "checkpoints/step-00000002.pt"
    message = made_with(before, "12 images, 12 per epoch and 4 per step")
    require_answer(Bad(command=WORDS + " --train_data few", message=message), here, capfd)


def test_a_run_does_not_resume_with_other_images_of_the_same_number(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    some_images(here / "images", classes=2, each=8)
    assert main(["db", "create", "images", "other"]) == 0
    message = (
        f"{NEWEST} was written with the same number of images, but the images or labels differ. "
        "Use the same data, or start a new run from its weights with --weights."
    )
    require_answer(Bad(command=WORDS + " --train_data other", message=message), here, capfd)


def test_a_finished_run_is_left_as_it_is(here: Path) -> None:
    (here / RUN / "finished").write_text("finished\n")
    message = "run r is finished; give another --run_id to train again, or more --num_epochs."
    require_run_answer(Bad(command=WORDS, message=message, status=0), here)
    message += " Nothing is trained with --momentum 0.5 instead of 0.9."
    require_run_answer(Bad(command=WORDS + " --momentum 0.5", message=message, status=0), here)


def test_a_damaged_configuration_is_named(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for damage, reason in ((b"torn = ", "Invalid value .*"), (b"\xff\xfe", ".*can't decode.*")):
        (here / RUN / "config.toml").write_bytes(damage)
        message = (
            rf"runs/r/config.toml can't be read \({reason}\): restore the file, or give "
            "another --run_id."
        )
        require_answer(Bad(command=WORDS, message=message, status=1), here, capfd)


def test_a_damaged_number_of_the_last_generation_is_named(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / RUN / "generation").write_text("")
    message = (
        RANK_PREFIX
        + "runs/r/generation is damaged; it must contain the number of the run's last generation: "
        "write that number into it, or give another --run_id."
    )
    require_answer(Bad(command=WORDS, message=message, status=1), here, capfd)


def test_damaged_events_are_named_by_their_line(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (path,) = event_files(here / RUN)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:3], "damaged\n", *lines[4:]]))
    message = (
        r"\S+/runs/r/events.\w+-0.jsonl, line 4: not an event \(.*\); the file is damaged, restore "
        r"it from a copy."
    )
    require_answer(Bad(command="ledger r", message=message, status=1), here, capfd)
    path.write_text("".join([*lines[:4], *lines[6:]]))
    assert main(["ledger", "r"]) == 1
    assert "Not exact: " in capfd.readouterr().out


def test_weights_are_no_checkpoint_to_start_from(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.save({"2.weight": torch.ones(3, 48)}, here / "weights.pt")
    message = (
        "weights.pt: not a run's checkpoint: it has no 'paceline'; give one that a run wrote, or "
        "load weights with --weights."
    )
    words = WORDS + " --run_id new --resume weights.pt"
    require_answer(Bad(command=words, message=message, status=1), here, capfd)


def test_a_checkpoint_of_another_model_is_no_start(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    message = (
        f"{RANK_PREFIX}--resume {NEWEST}: the checkpoint's model doesn't fit: .* size mismatch for "
        r"2.weight: .*\]\); give the model that it was trained with\."
    )
    (here / "other.py").write_text(NET.replace("AvgPool2d(8)", "AvgPool2d(16)").replace("48", "12"))
    words = WORDS.replace("own:net", "other:net") + f" --run_id new --resume {NEWEST}"
    require_answer(Bad(command=words, message=message, writes=True), here, capfd)
