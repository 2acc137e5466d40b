"""A file of weights is whole, or named as torn or damaged before anything is read from it."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paceline.cli.flags import parse
from paceline.config.train import TrainConfig
from paceline.errors import CheckpointError
from paceline.session.checks import check
from paceline.state.file_integrity import check_header, check_integrity

STATE = {"model": {"weight": torch.arange(30.0), "bias": torch.ones(3)}, "epoch": 4}


def torch_file(path: Path) -> Path:
    torch.save(STATE, path)
    return path


def safetensors_file(path: Path) -> Path:
    save_file(STATE["model"], path)  # type: ignore[arg-type]
    return path


def test_whole_files_are_told_by_their_content_whatever_their_name(tmp_path: Path) -> None:
    old = tmp_path / "old.pt"
    torch.save(STATE, old, _use_new_zipfile_serialization=False)
    nothing = tmp_path / "nothing.pt"
    save_file({"empty": torch.zeros(0)}, nothing)  # its header ends where the file ends
    no_tensors = tmp_path / "no tensors.pt"
    save_file({}, no_tensors)
    kinds = {
        nothing: "safetensors",
        no_tensors: "safetensors",
        torch_file(tmp_path / "weights.safetensors"): "torch",
        safetensors_file(tmp_path / "weights.pt"): "safetensors",
        old: "old torch",
    }
    for path, kind in kinds.items():
        check_integrity(path)
        assert check_header(path) == kind


@pytest.mark.parametrize("make", [torch_file, safetensors_file])
def test_a_truncated_file_is_named_by_its_ends_alone(tmp_path: Path, make: object) -> None:
    assert callable(make)
    path = make(tmp_path / "w.pt")
    content = path.read_bytes()
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"w\.pt: (torn or damaged|not a file)"):
            check_header(path)


# 0x10 in the archive's directory marks a tensor as a folder, which torch leaves uninitialised.
@pytest.mark.parametrize(("bit", "stride"), [(0x01, 5), (0x10, 1), (0x80, 5)])
def test_no_flipped_bit_becomes_a_weight(tmp_path: Path, bit: int, stride: int) -> None:
    path = torch_file(tmp_path / "w.pt")
    content = path.read_bytes()
    caught = 0
    for place in range(0, len(content), stride):
        path.write_bytes(content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :])
        try:
            check_integrity(path)
            state = torch.load(path, weights_only=True)
        except Exception as error:
            caught += isinstance(error, CheckpointError)
            continue  # torch stumbles over some headers that zipfile forgives
        assert state["epoch"] == 4
        assert all(torch.equal(state["model"][k], v) for k, v in STATE["model"].items())  # type: ignore[attr-defined]
    assert caught > len(content) // stride // 3


def test_a_flipped_bit_in_a_tensor_is_a_wrong_checksum(tmp_path: Path) -> None:
    path = torch_file(tmp_path / "w.pt")
    content = bytearray(path.read_bytes())
    content[content.index(torch.arange(30.0).numpy().tobytes()) + 40] ^= 1
    path.write_bytes(content)
    check_header(path)
    with pytest.raises(CheckpointError, match=r"w\.pt: torn or damaged \(the checksum of .*data/0"):
        check_integrity(path)


def test_a_file_written_without_checksums_passes(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        path = torch_file(tmp_path / "w.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is not None
    check_integrity(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", r"torn or damaged \(it is empty\)"),
        (b"loss,accuracy\n0.5,0.9\n", "not a file of weights"),
        (pickle.dumps({"weight": [1.0]}), "not a file of weights"),
        (b"\xff\xff\xff\xff\xff\xff\xff\xff{}", r"torn .*its header should have"),
        (b"\x02\x00\x00\x00\x00\x00\x00\x00{]", r"torn .*its header can't be read"),
    ],
)
def test_something_else_is_named(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "w.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"w\.pt: {reason}"):
        check_integrity(path)


def test_an_archive_that_torch_save_did_not_write_is_named(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("letter.txt", "hello")
    with pytest.raises(CheckpointError, match="a zip archive, but not one"):
        check_integrity(path)


def test_torchscript_is_named(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    with zipfile.ZipFile(path, "w") as archive:  # as torch.jit.save lays it out
        archive.writestr("w/data.pkl", b"")
        archive.writestr("w/constants.pkl", b"")
    with pytest.raises(CheckpointError, match="a zip archive, but not one"):
        check_integrity(path)


def test_a_folder_and_a_missing_file_are_sentences(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.pt"):
        with pytest.raises(CheckpointError, match=r"can't be read \((Is a dir|No such file)"):
            check_integrity(path)


def test_a_torn_file_is_named_before_anything_is_written(tmp_path: Path) -> None:
    path = torch_file(tmp_path / "w.pt")
    path.write_bytes(path.read_bytes()[:-30])
    words = ["--train_data", "null", "--model", "resnet20", "--load_model_path", str(path)]
    config = parse(TrainConfig, words, prog="paceline train", description="")
    with pytest.raises(CheckpointError, match=r"w\.pt: torn or damaged"):
        check(config, gpus=0)
