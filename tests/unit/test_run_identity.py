"""What makes two configurations one run: default ids, flags that are missing, more epochs."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from dataclasses import dataclass, make_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.supervision.supervisor import finished_sentence
from paceline.config import train as config_train
from paceline.config.data import DataConfig
from paceline.config.optim import OptimConfig
from paceline.config.run import OutputConfig
from paceline.config.train import TrainConfig, difference, edits
from paceline.errors import ConfigError
from paceline.state.run_folder import CONFIG_NAME, RunFolder, choose_run_id, record_edits

OLD_DIGEST = "7c7a494b"  # of `--train_data x`, by a Paceline that digested all flags


def config_of(**optim: Any) -> TrainConfig:
    return TrainConfig(data=DataConfig(train_data="x"), optim=OptimConfig(**optim))


@pytest.fixture
def with_new_flag(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return configurations of a later Paceline, whose optimizer has one more flag."""
    kind = make_dataclass(
        "Later",
        [("nesterov", bool, dataclasses.field(default=True))],
        bases=(OptimConfig,),
        frozen=True,
        kw_only=True,
    )
    later = replace(config_of(), optim=kind())
    values = later.identity()
    monkeypatch.setattr(config_train, "_defaults", lambda: values)
    return lambda **optim: replace(config_of(), optim=kind(**optim))


def test_a_default_digest_of_old_is_still_known() -> None:
    assert config_of().digests()[1] == OLD_DIGEST
    assert config_of(seed=1).digests()[1] != OLD_DIGEST


def test_a_new_flag_at_its_default_changes_no_digest(with_new_flag: Any) -> None:
    assert with_new_flag().digests() == config_of().digests()
    assert with_new_flag(seed=3).digests() == config_of(seed=3).digests()


def test_a_new_flag_that_is_given_makes_another_run_that_is_not_an_old_one(
    with_new_flag: Any,
) -> None:
    (digest,) = with_new_flag(nesterov=False).digests()
    assert digest not in config_of().digests()


@pytest.mark.parametrize(
    "flags", [{"snapshots": False, "snapshot_memory_mb": 1.0}, {"tracker": "wandb"}]
)
def test_a_run_may_resume_with_and_without_snapshots_and_trackers(flags: dict[str, Any]) -> None:
    off = replace(config_of(), output=OutputConfig(**flags))
    assert off.digests() == config_of().digests()
    assert difference(config_of().identity(), off.identity()) == ""


def test_each_flag_and_the_data_make_another_default_id() -> None:
    other = TrainConfig(data=DataConfig(train_data="y"))
    digests = [config.digests()[0] for config in (config_of(), config_of(momentum=0.5), other)]
    assert len(set(digests)) == 3


def test_a_flag_that_a_run_lacks_has_its_default() -> None:
    saved = config_of().identity()
    del saved["transport"]
    assert difference(saved, config_of().identity()) == ""
    given = replace(config_of(), sync=replace(config_of().sync, transport="nixl"))
    assert difference(saved, given.identity()) == "transport"
    assert difference({**saved, "unheard_of": 1}, config_of().identity()) == "unheard_of"


def test_lists_and_tuples_are_equal() -> None:
    saved = config_of().identity() | {"image_mean_per_channel": [128.0]}  # as TOML has it
    assert difference(saved, config_of().identity()) == ""


def test_more_epochs_are_the_same_run_and_fewer_are_not() -> None:
    six, eight = config_of(num_epochs=6).identity(), config_of(num_epochs=8).identity()
    assert difference(six, eight) == ""
    assert difference(eight, six) == "num_epochs"


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("base_learning_rate", 0.2), ("scale_lr", True), ("lr_policy", "cosine")),
        *(("warmup_epochs", 2.0), ("momentum", 0.8), ("weight_decay", 0.0)),
        *(("label_smoothing", 0.1), ("clip_norm", 1.0), ("clip_value", 1.0), ("max_loss", 0.0)),
    ],
)
def test_a_run_continues_with_an_edited_hyperparameter(flag: str, value: Any) -> None:
    edited = config_of(**{flag: value}).identity()
    assert difference(config_of().identity(), edited) == ""
    assert edits(config_of().identity(), edited) == {flag: value}
    assert difference(config_of().identity(), {**edited, "wire": "bf16"}) == "wire"


@pytest.mark.parametrize(
    ("flag", "value"), [("seed", 1), ("batch_size", 16), ("no_bn_decay", True)]
)
def test_other_flags_of_the_optimization_make_another_run(flag: str, value: Any) -> None:
    other = config_of(**{flag: value}).identity()
    assert difference(config_of().identity(), other) == flag
    assert edits(config_of().identity(), other) == {}


def test_a_hyperparameter_that_a_run_lacks_had_its_default() -> None:
    saved = config_of().identity()
    del saved["clip_norm"]
    assert edits(saved, config_of().identity()) == {}
    assert edits(saved, config_of(clip_norm=1.0).identity()) == {"clip_norm": 1.0}


def test_a_run_that_a_bad_record_has_stopped_continues_without_such_records() -> None:
    stop = config_of()
    skip = replace(stop, data=replace(stop.data, bad_records="skip"))
    assert difference(stop.identity(), skip.identity()) == ""
    assert difference(skip.identity(), stop.identity()) == "bad_records"
    assert stop.digests()[0] in skip.digests()[1:]
    assert skip.digests()[0] not in stop.digests()


def test_a_scripts_run_is_not_one_of_the_command() -> None:
    assert difference({"seed": 0}, config_of().identity()) != ""
    assert difference({"seed": 0}, {"seed": 0}) == ""
    assert difference({"seed": 0}, {"seed": 1}) == "seed"


def test_an_unfinished_run_under_its_older_id_is_found(tmp_path: Path) -> None:
    def choose(*, anew: bool = False) -> str:
        return choose_run_id(tmp_path, "new", "old", anew=anew)

    assert choose() == "new-1"
    (tmp_path / "old-1").mkdir()
    RunFolder(tmp_path / "old-1", shard_id=0).finish()
    assert choose() == "new-1"
    (tmp_path / "old-2").mkdir()
    assert choose() == "old-2"
    assert choose(anew=True) == "new-1"
    (tmp_path / "new-1").mkdir()
    assert choose() == "new-1"
    RunFolder(tmp_path / "new-1", shard_id=0).finish()
    assert choose() == "old-2"


@dataclass
class Folder:
    """A run's folder, opened anew for each look."""

    path: Path

    def open(self, config: TrainConfig) -> None:
        folder = RunFolder(self.path, shard_id=0)
        folder.check(config.identity())
        folder.open(config.identity())
        folder.close()

    def finish(self) -> None:
        RunFolder(self.path, shard_id=0).finish()

    def finished_as(self, config: TrainConfig) -> bool:
        folder = RunFolder(self.path, shard_id=0)
        return folder.finished_as(config.identity())

    def begun_as(self, config: TrainConfig) -> bool:
        return RunFolder(self.path, shard_id=1).begun_as(config.identity())


def test_a_finished_run_continues_with_more_epochs_and_is_unfinished_until_then(
    tmp_path: Path,
) -> None:
    folder, six, eight = Folder(tmp_path / "r"), config_of(num_epochs=6), config_of(num_epochs=8)
    assert not folder.begun_as(six)
    folder.open(six)
    assert folder.begun_as(six)
    assert not folder.begun_as(eight)  # the other machines' mark of six is none of eight
    folder.finish()
    assert folder.finished_as(six)
    assert not folder.finished_as(eight)
    folder.open(eight)
    assert not folder.finished_as(eight)
    assert "num_epochs = 8" in (folder.path / CONFIG_NAME).read_text()
    folder.finish()
    assert folder.finished_as(eight)
    with pytest.raises(ConfigError, match="started with --num_epochs 8, but --num_epochs is now 6"):
        folder.open(six)


def test_a_started_run_is_not_written_anew_by_the_same_command(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "r")
    folder.open(config_of())
    saved = (folder.path / CONFIG_NAME).read_text().replace("seed = 0\n", "")
    (folder.path / CONFIG_NAME).write_text(saved)  # of a Paceline without that flag
    folder.open(config_of())
    assert (folder.path / CONFIG_NAME).read_text() == saved
    with pytest.raises(
        ConfigError, match=r"started with --batch_size 32, but --batch_size is now 16"
    ):
        folder.open(config_of(batch_size=16))


def test_an_edited_hyperparameter_is_recorded_when_the_start_isnt_refused_any_more(
    tmp_path: Path,
) -> None:
    def known() -> tuple[float, int]:
        saved = tomllib.loads((folder.path / CONFIG_NAME).read_text())
        return saved["momentum"], saved["num_epochs"]

    folder = Folder(tmp_path / "r")
    folder.open(config_of(num_epochs=6))
    edited = config_of(num_epochs=8, momentum=0.8)
    folder.open(edited)
    assert known() == (0.9, 8)
    record_edits(folder.path, edited.identity())
    assert known() == (0.8, 8)
    folder.open(edited)
    record_edits(folder.path, edited.identity())
    assert known() == (0.8, 8)
    record_edits(folder.path, config_of(num_epochs=8).identity())
    assert known() == (0.9, 8)


def test_only_more_epochs_continue_a_run_that_trained_all_of_them(tmp_path: Path) -> None:
    folder, known = Folder(tmp_path / "r"), config_of(num_epochs=6, patience=2)
    folder.open(known)
    folder.finish()
    others = config_of(num_epochs=6, patience=3), config_of(num_epochs=6, target_accuracy=0.5)
    for reason, ends in (("", True), ("no better accuracy (--patience 2)", False)):
        end = {"event": "end", "generation": 0, "best": 0.5, "best_epoch": 1, "reason": reason}
        (folder.path / "events.a-0.jsonl").write_text(f"{json.dumps(end)}\n")
        assert folder.finished_as(known)
        assert [folder.finished_as(other) for other in others] == [ends, ends]
        assert [folder.begun_as(other) for other in others] == [ends, ends]
        assert not folder.finished_as(config_of(num_epochs=7, patience=3))


def test_a_finished_run_is_finished_with_edited_hyperparameters_too(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "r")
    folder.open(config_of())
    folder.finish()
    edited = config_of(momentum=0.8)
    assert folder.finished_as(edited)
    again = RunFolder(folder.path, shard_id=0)
    assert again.edits(config_of().identity()) == []
    assert finished_sentence("r", again.edits(edited.identity())) == (
        "run r is finished; give another --run_id to train again, or more --num_epochs. "
        "Nothing is trained with --momentum 0.8 instead of 0.9."
    )
