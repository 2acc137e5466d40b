"""A run by a file of flags: the bits of the run by flags, also by that run's own file."""

from __future__ import annotations

import tomllib
from pathlib import Path

import torch

from tests.harness.processes.command import run

FLAGS = {
    **{"train_data": "null", "model": "resnet20", "image_size": 32, "num_labels": 3},
    **{"batch_size": 4, "epoch_size": 8, "num_epochs": 1, "momentum": 0.8, "sync": "notified"},
    **{"augment": "pad", "num_workers": 2, "use_cpu": True},
}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    values: dict[str, torch.Tensor] = torch.load(folder / "resnet20_model.pt", weights_only=True)
    return values


def test_flags_a_file_and_the_runs_own_file_make_the_same_bits(tmp_path: Path) -> None:
    words = [f"--{name}={value}" for name, value in FLAGS.items()]
    lines = [f"{name} = {str(value).lower()}" for name, value in FLAGS.items() if value is True]
    lines += [f"{name} = {value!r}" for name, value in FLAGS.items() if value is not True]
    (tmp_path / "run.toml").write_text("\n".join(lines))
    by = {
        "flags": [*words, "--run_id", "flags"],
        "file": ["--config", "run.toml", "--run_id", "file"],
        "own": ["--config", "runs/flags/config.toml", "--output_dir", "own"],
    }
    for each in by.values():
        ended = run("train", *each, folder=tmp_path)
        assert ended.status == 0, ended.text
    (own,) = (tmp_path / "own").iterdir()  # under a name of its own, though not told
    first = weights(tmp_path / "runs/flags")
    for other in (tmp_path / "runs/file", own):
        found = weights(other)
        assert all(torch.equal(value, found[name]) for name, value in first.items())
        assert (other / "config.toml").read_text() == (
            tmp_path / "runs/flags/config.toml"
        ).read_text()
    flags = tomllib.loads((own / "config.toml").read_text())
    assert (flags["train_data"], flags["num_workers"]) == ("null", 2)
    assert not {"run_id", "resume", "output_dir", "config"} & flags.keys()
