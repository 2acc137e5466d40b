"""`--config FILE`: the flags of a file come before the user's, which win."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from paceline.cli.config_file import with_file
from paceline.cli.flags import parse
from paceline.config.train import TrainConfig, difference
from paceline.errors import ConfigError


def config_of(*words: str) -> TrainConfig:
    return parse(TrainConfig, with_file(words, TrainConfig), prog="paceline train", description="")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.toml"


def test_a_runs_own_flags_are_the_same_configuration(file: Path) -> None:
    words = (
        *("--train_data", "a=b", "--test_data", "test", "--num_workers", "3", "--use_cpu"),
        *("--image_mean_per_channel", "-1", "2.5", "3", "--no_channels_last", "--seed", "9"),
        *("--dtype", "bfloat16", "--base_learning_rate", "1e-3", "--max_loss_at", "epoch"),
    )
    config = config_of(*words)
    file.write_text(tomli_w.dumps(config.identity() | config.started()))
    assert config_of("--config", str(file)) == config
    assert config_of(f"--config={file}") == config


def test_flags_win_over_the_file_and_the_later_file_over_the_earlier(
    file: Path, tmp_path: Path
) -> None:
    file.write_text('train_data = "x"\nbatch_size = 8\nnum_epochs = 3\nuse_cpu = true\n')
    other = tmp_path / "other.toml"
    other.write_text("num_epochs = 4\nimage_mean_per_channel = 7\ncompile = true\n")
    words = ("--batch-size", "2", "--config", str(file), "--config", str(other), "--use_cpu", "0")
    config = config_of(*words)
    assert (config.optim.batch_size, config.optim.num_epochs, config.world.use_cpu) == (2, 4, False)
    assert config.data.image_mean_per_channel == (7.0,)


@pytest.mark.parametrize(
    ("line", "words", "name"),
    [
        ("num_workers = 2", ("--num_gpus", "3"), "num_gpus"),
        ('model = "resnet20"', ("--num_layers", "34"), "num_layers"),
    ],
)
def test_a_flag_replaces_the_files_other_way_to_say_it(
    line: str, words: tuple[str, ...], name: str, file: Path
) -> None:
    file.write_text(f'train_data = "x"\n{line}\n')
    config = config_of("--config", str(file), *words)
    assert config.flat()[name] == int(words[1])
    assert config.model.name == ("resnet34" if name == "num_layers" else "resnet50")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("batch_sise = 8", "there is no flag batch_sise; did you mean batch_size?"),
        ("lr = 0.1", "there is no flag lr; did you mean base_learning_rate?"),
        ("xyzzy = 1", "there is no flag xyzzy; see paceline train --help."),
        ('config = "other.toml"', "there is no flag config;"),
        ("batch_size = 8.0", "batch_size = 8.0: must be a whole number, such as 32."),
        ("batch_size = true", "batch_size = True: must be a whole number, such as 32."),
        ('momentum = "big"', "momentum = 'big': must be a number, such as 0.1."),
        ("use_cpu = 1", "use_cpu = 1: must be true or false."),
        ("model = 20", "model = 20: must be text in quotes"),
        ('dtype = "double"', "dtype = 'double': must be one of float, float16, bfloat16."),
        ("image_mean_per_channel = []", "image_mean_per_channel = []: must be numbers"),
        ("[data]", "there is no flag data; "),
        ("batch_size 8", "the file can't be read (no TOML: "),
        (None, "the file can't be read (No such file or directory); give a file with lines"),
    ],
)
def test_a_mistake_in_the_file_is_a_sentence_with_file_and_key(
    text: str | None, sentence: str, file: Path
) -> None:
    if text is not None:
        file.write_text(f"{text}\n")
    with pytest.raises(ConfigError) as caught:
        config_of("--train_data", "null", "--config", str(file))
    assert f"--config {file}: {sentence}" in str(caught.value)


def test_the_flag_needs_a_file() -> None:
    with pytest.raises(ConfigError, match="--config: give the path of a TOML file"):
        config_of("--train_data", "null", "--config")


def test_what_a_start_has_of_its_own_makes_no_other_run() -> None:
    def values(*words: str) -> dict[str, Any]:
        config = config_of(*words)
        return config.identity() | config.started()

    one = values("--train_data", "x", "--num_workers", "2")
    assert difference(one, values("--train_data", "y", "--num_workers", "3")) == ""


def test_a_file_has_texts_and_a_flag_by_its_other_name(file: Path) -> None:
    file.write_text('weights = "w.pt"\nfreeze = ["layer1.*", "conv1.*"]')
    config = config_of("--config", str(file), "--train_data", "null")
    assert config.model.load_model_path == "w.pt"
    assert config.model.freeze == ("layer1.*", "conv1.*")
    file.write_text('load_model_path = "v.pt"\nfreeze = []')
    config = config_of("--config", str(file), "--train_data", "null", "--weights=w.pt")
    assert (config.model.load_model_path, config.model.freeze) == ("w.pt", ())
    file.write_text("freeze = [1]")
    with pytest.raises(ConfigError, match=r"freeze = \[1\]: must be texts, such as"):
        config_of("--config", str(file))
