"""Command lines become configurations, Caffe2's old habits included."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.cli import train as cli_train
from paceline.cli.flags import parse
from paceline.cli.notes import notes
from paceline.cluster.rendezvous.preflight import configuration_facts
from paceline.cluster.stores.store_spec import StoreSpec
from paceline.codecs.codecs import CODECS
from paceline.config.run import OutputConfig
from paceline.config.train import TrainConfig
from paceline.config.world import CHOICES, METHODS
from paceline.errors import ConfigError
from paceline.wiring.candidates import CANDIDATES
from paceline.wiring.exchange import SYNCHRONIZERS


def config_of(*words: str) -> TrainConfig:
    return parse(TrainConfig, words, prog="paceline train", description="")


# Caffe2's resnet50_trainer.py, its flags and defaults.
CAFFE2_DEFAULTS = {
    "test_data": "",
    "db_type": "lmdb",
    "num_channels": 3,
    "image_size": 227,
    "num_labels": 1000,
    "batch_size": 32,
    "epoch_size": 1_500_000,
    "test_epoch_size": 50_000,
    "num_epochs": 1000,
    "base_learning_rate": 0.1,
    "weight_decay": 1e-4,
    "num_shards": 1,
    "shard_id": 0,
    "redis_port": 6379,
    "num_layers": 50,
    "dtype": "float",
    "first_iter_timeout": 1200,
    "timeout": 60,
    "cudnn_workspace_limit_mb": 64,
    "distributed_transport": "tcp",
    "distributed_interfaces": "",
}


def test_defaults_are_caffe2s() -> None:
    flat = config_of("--train_data", "null").flat()
    assert {name: flat[name] for name in CAFFE2_DEFAULTS} == CAFFE2_DEFAULTS


def test_flags_are_accepted_with_underscores_and_hyphens() -> None:
    one = config_of(
        "--train_data", "null", "--batch_size", "8", "--image-mean-per-channel", "1", "2", "3"
    )
    other = config_of(
        "--train-data", "null", "--batch-size", "8", "--image_mean_per_channel", "1", "2", "3"
    )
    assert one == other
    assert one.data.each_channel(one.data.image_mean_per_channel) == (1, 2, 3)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--use_cpu"], True),
        (["--use_cpu", "True"], True),
        (["--use-cpu=1"], True),
        (["--use_cpu", "false"], False),
        ([], False),
    ],
)
def test_switches_may_have_a_value(words: list[str], expected: bool) -> None:
    config = config_of("--train_data", "null", *words, "--num_gpus", "2")
    assert config.world.use_cpu is expected
    assert config.world.num_gpus == 2


def test_a_switch_that_is_on_can_be_switched_off() -> None:
    assert not config_of("--train_data", "null", "--channels_last", "0").model.channels_last
    assert not config_of("--no_channels_last", "--train_data", "null").model.channels_last
    assert not config_of("--train_data", "null", "--no_channels_last", "1").model.channels_last
    assert config_of("--train_data", "null", "--no_channels_last=False").model.channels_last
    assert config_of("--train_data", "null").output.snapshots
    assert not config_of("--train_data", "null", "--no_snapshots").output.snapshots


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--batch_sise", "3"], "--batch_size"),
        (["--batch_size", "0"], "--batch_size 0: must be at least 1"),
        (["--num_channels", "2"], "must be 1 (grey) or 3 (RGB)"),
        (["--image_size", "500"], "--scale 256 is smaller than --image_size 500"),
        (["--shard_id", "1"], "--shard_id 1: must be 0 to 0"),
        (["--num_shards", "2"], "needs a rendezvous"),
        (["--num_shards", "2", "--redis_host", "h"], "needs --run_id"),
        (["--redis_host", "h", "--master", "h:1"], "select different rendezvous methods"),
        (["--num_gpus", "2", "--num_workers", "2"], "are redundant"),
        (["--gpus", "0,1", "--num_workers", "2"], "are redundant"),
        (["--gpus", "0,zero"], "--gpus 0,zero"),
        (["--run_id", "a/b"], "--run_id 'a/b': the value is used as a file name"),
        (["--run_id", "a\nb"], "the value is used as a file name"),
        (["--run_id", "a" * 300], "use at most 200 bytes in UTF-8"),
        (
            ["--save_model_name", "../x"],
            "--save_model_name '../x': the value is used as a file name",
        ),
        (["--bucket_mb", "inf"], "must be at least 0 and finite"),
        (["--snapshot_memory_mb", "-1"], "--snapshot_memory_mb -1.0: must be at least 0"),
        (["--wire", "bf16", "--sync", "allreduce"], "--wire bf16 needs --sync notified"),
        (["--update", "sharded", "--sync", "allreduce"], "--update sharded needs --sync notified"),
        (["--transport", "nixl", "--sync", "allreduce"], "--transport nixl needs --sync notified"),
        (["--connections", "2", "--sync", "allreduce"], "--connections 2 needs --sync notified"),
        (["--connections", "2", "--transport", "nixl"], "--connections 2 needs --transport tcp"),
        (["--connections", "33"], "--connections 33: must be from 0 to 32"),
        (["--timeout", "inf"], "must be greater than 0 and finite"),
        (["--peer_timeout", "0.01"], "must be at least 1; heartbeats come twice a second"),
        (["--base_learning_rate", "nan"], "must be greater than 0"),
        (["--image_mean_per_channel", "nan"], "--image_mean_per_channel nan"),
        (["--gpus", "0, x"], "must be whole numbers"),
        (["--image_std_per_channel", "0"], "must be greater than 0"),
        (["--image_mean_per_channel", "1", "2"], "has 2 values"),
        (["--learning_rate", "1"], "--base_learning_rate"),
        (["--dtype", "double"], "float16"),
        (["--decode_workers", "256"], "--decode_workers 256: must be from 0 to 255"),
        (["--decode_threads", "-1"], "--decode_threads -1: must be from 0 to 255"),
        (["--decode_workers", "0", "--decode_threads", "2"], "but differ: give --decode_workers"),
    ],
)
def test_a_mistake_ends_with_status_2_and_says_what_is_wrong(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((SystemExit, ConfigError)) as caught:
        config_of("--train_data", "null", *words)
    assert getattr(caught.value, "code", 2) == 2
    printed = f"{caught.value} {capsys.readouterr().err}"
    assert told in " ".join(printed.replace("│", " ").split())


def test_of_gpus_and_num_gpus_the_first_counts_as_in_caffe2() -> None:
    config = config_of("--train_data", "null", "--gpus", "0,2,3", "--num_gpus", "2")
    assert config.world.workers == 3


def test_an_empty_value_is_a_value() -> None:
    config = config_of("--train_data", "null", "--test_data", "", "--use_cpu")
    assert config.data.test_data == ""
    assert config.world.use_cpu


@pytest.mark.parametrize(
    ("words", "workers"),
    [
        ((), None),
        (("--decode_workers", "0"), 0),
        (("--decode_workers", "3"), 3),
        (("--decode_threads", "3"), 3),
        (("--decode_threads", "0"), None),
        (("--decode_threads", "3", "--decode_workers", "3"), 3),
    ],
)
def test_both_names_of_the_number_of_decode_processes_mean_the_same(
    words: tuple[str, ...], workers: int | None
) -> None:
    config = config_of("--train_data", "null", *words)
    assert config.data.fixed_decode_workers == workers
    assert config.identity() == config_of("--train_data", "null").identity()


def test_help_has_groups_and_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        config_of("--help")
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    for flag in [*CAFFE2_DEFAULTS, "use_cpu", "label_smoothing", "bucket_mb"]:
        assert f"--{flag}" in text
    assert "data options" in text


def test_what_was_chosen_for_the_person_is_said() -> None:
    config = config_of(
        "--train_data", "null", "--num_gpus", "3", "--use_nccl", "--batch_size", "32"
    )
    assert list(notes(config, gpus=0)) == [
        "torch finds no usable GPU here: starting 3 CPU workers instead.",
        "--batch_size 32 is not divisible by 3 workers: 2 of them process 11 images per step and "
        "the others 10.",
        "--use_nccl is deprecated and has no effect.",
    ]
    assert list(notes(config_of("--train_data", "null"), gpus=0)) == []
    few = config_of("--train_data", "null", "--num_workers", "3", "--batch_size", "2")
    (told,) = notes(few, gpus=0)
    assert told.endswith("by 3 workers: 2 of them process 1 image per step and the others 0.")
    fine = ["--wire", "int8", "--connections", "4"]
    for told, flag in zip(
        notes(config_of("--train_data", "null", *fine), gpus=0), fine[::2], strict=True
    ):
        assert told.startswith(f"{flag} ")
        assert "has no effect on one machine" in told
    by_nixl = ["--transport", "nixl", "--wire", "int8"]
    assert list(notes(config_of("--train_data", "null", *by_nixl), gpus=0)) == []
    apart = ["--num_shards", "2", "--run_id", "r", "--master", "node0:1"]
    assert list(notes(config_of("--train_data", "null", *fine, *apart), gpus=0)) == []


def test_the_identity_of_a_run_is_the_same_on_all_machines_and_has_no_password() -> None:
    words = ["--train_data", "null", "--num_shards", "2", "--run_id", "r"]
    url = "redis://:pass-word@host:1/0"
    one = config_of(*words, "--redis_url", url)
    other = config_of(*words, "--file_store_path", "/x", "--shard_id", "1", "--num_workers", "5")
    assert one.identity() == other.identity()
    assert one.digests() == other.digests()
    assert "pass-word" not in str(one.flat())
    assert one.flat()["redis_url"] == "redis://host:1/0"
    through_etcd = config_of(*words, "--etcd", "https://me:pass-word@a:1,b:2?cacert=ca.pem")
    assert through_etcd.identity() == one.identity()
    assert through_etcd.flat()["etcd"] == "https://a:1,b:2?cacert=ca.pem"


def test_steps_to_be_traced_are_all_machines_and_not_the_runs_identity() -> None:
    plain = config_of("--train_data", "null")
    config = config_of("--train_data", "null", "--trace_steps", "10:12")
    assert (plain.output.traced, config.output.traced) == (None, range(10, 13))
    assert config.identity() == plain.identity()
    assert configuration_facts(config)["--trace_steps"] == "10:12"


@pytest.mark.parametrize("steps", ["5", "5:", ":5", "5:4", "-1:4", "a:b", "1:2:3"])
def test_steps_that_cannot_be_traced(steps: str) -> None:
    with pytest.raises(ConfigError, match=rf"--trace_steps {steps}: give the first and the last"):
        OutputConfig(trace_steps=steps)


def test_a_configuration_is_checked_wherever_it_is_made() -> None:
    from paceline.config.optim import OptimConfig

    with pytest.raises(ConfigError, match=r"--momentum 1\.0: must be at least 0 and less than 1"):
        OptimConfig(momentum=1.0)


CLUSTER = ("--train_data", "null", "--num_shards", "2", "--run_id", "r", "--file_store_path", "/x")


@pytest.mark.parametrize("redis", [("--redis_host", "h"), ("--redis_url", "redis://h:1/0")])
def test_beside_redis_the_folder_of_saved_models_is_no_rendezvous(redis: tuple[str, str]) -> None:
    config = config_of(*CLUSTER, *redis)
    (told,) = notes(config, gpus=2)
    assert told.startswith("--file_store_path /x isn't used: the rendezvous is through Redis")
    store = StoreSpec.of(config.world, "space")
    assert store is not None
    assert (store.kind, "h" in store.address) == ("redis", True)
    assert not list(notes(config_of(*CLUSTER), gpus=2))


def test_a_folder_beside_machine_0_is_two_rendezvous_methods() -> None:
    said = "--file_store_path and --master select different rendezvous methods"
    with pytest.raises(ConfigError, match=said):
        config_of(*CLUSTER, "--master", "h:1")


def test_caffe2s_name_for_its_resnet_is_a_resnet() -> None:
    words = ("--train_data", "null", "--model", "resnext", "--resnext_width_per_group", "64")
    config = config_of(*words, "--resnext_num_groups", "1", "--num_layers", "101")
    assert config.model.name == "resnet101"
    assert list(notes(config, gpus=0)) == []
    with pytest.raises(
        ConfigError, match="--resnext_num_groups 32: the built-in models are ResNets"
    ):
        config_of(*words, "--resnext_num_groups", "32")


def test_caffe2s_choice_of_a_cpu_library_changes_nothing() -> None:
    (told,) = notes(config_of("--train_data", "null", "--use_ideep"), gpus=0)
    assert told.startswith("--use_ideep is deprecated and has no effect")


def test_each_method_of_the_table_has_its_class_and_each_candidate_is_one() -> None:
    assert {*SYNCHRONIZERS, "average"} == METHODS.keys()
    assert {sync for rows in CANDIDATES.values() for sync, _ in rows} <= METHODS.keys()
    assert set(CHOICES["wire"]) >= CODECS.keys()


@pytest.mark.parametrize(
    ("prog", "at"), [("paceline train", "step"), ("resnet50_trainer", "epoch")]
)
def test_resnet50_trainer_compares_the_loss_at_an_epochs_end(
    monkeypatch: pytest.MonkeyPatch, prog: str, at: str
) -> None:
    started: list[tuple[TrainConfig, Sequence[str]]] = []

    def supervise(config: TrainConfig, argv: Sequence[str], note: str) -> int:
        started.append((config, argv))
        return 0

    monkeypatch.setattr(cli_train, "_supervise", supervise)
    assert cli_train.main(["--train_data", "null"], prog=prog) == 0
    assert cli_train.main(["--train_data", "null", "--max_loss_at", "step"], prog=prog) == 0
    assert [config.optim.max_loss_at for config, _ in started] == [at, "step"]
    config, argv = started[0]
    assert config_of(*argv) == config  # what the workers are told
    assert config.digests() == config_of("--train_data", "null").digests()
