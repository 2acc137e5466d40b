"""What flags mean beside a launcher's word, and `paceline launch`'s own arguments."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed import HashStore

from paceline.cli.launch import main, split
from paceline.cli.notes import notes
from paceline.cli.train_launched import fitted, train_launched
from paceline.cluster.environment import Environment
from paceline.cluster.join import Joined
from paceline.cluster.launchers.launched_process import LaunchedProcess
from paceline.cluster.supervision.process_end import ProcessEnd
from paceline.config.data import DataConfig
from paceline.config.train import TrainConfig
from paceline.config.world import WorldConfig
from paceline.errors import ConfigError
from tests.harness.processes.worlds import world_of


def joined(launcher: str, machines: tuple[int, ...], machine: int = 0) -> Joined:
    return Joined(
        group=world_of(machines, sum(machines[:machine])),
        store=HashStore(),
        launcher=launcher,
        process_end=ProcessEnd(),
        rendezvous="node0:1234",
    )


def test_the_launchers_word_fills_the_flags_in() -> None:
    world = fitted(WorldConfig(run_id="r"), joined("torchrun", (2, 3), 1))
    assert (world.num_shards, world.shard_id, world.workers) == (2, 1, 3)
    assert world.master == "node0:1234"
    world = fitted(WorldConfig(run_id="r"), joined("mpirun", (4,)))
    assert (world.num_shards, world.shard_id, world.workers, world.master) == (1, 0, 4, "")


def test_flags_that_agree_stay() -> None:
    flags = WorldConfig(run_id="r", gpus="0,3", num_shards=2, shard_id=1, file_store_path="meet")
    world = fitted(flags, joined("slurm", (2, 2), 1))
    assert (world.gpu_numbers, world.file_store_path, world.master) == ((0, 3), "meet", "")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            {"num_workers": 3},
            "--num_workers 3: contradicts the launcher: torchrun started 2 on this machine",
        ),
        (
            {"num_gpus": 1},
            "--num_gpus 1: contradicts the launcher: torchrun started 2 on this machine",
        ),
        (
            {"gpus": "0,1,2"},
            "--gpus 0,1,2: contradicts the launcher: torchrun started 2 on this machine",
        ),
        (
            {"num_shards": 3, "master": "h:1", "run_id": "r"},
            "--num_shards 3: contradicts the launcher: torchrun started processes on 2",
        ),
        (
            {"num_shards": 2, "shard_id": 1, "master": "h:1", "run_id": "r"},
            "--shard_id 1: contradicts the launcher: torchrun started this on machine 0",
        ),
    ],
)
def test_a_flag_that_contradicts_the_launcher_names_both(
    flags: dict[str, object], told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        fitted(WorldConfig(**flags), joined("torchrun", (2, 2)))  # type: ignore[arg-type]
    assert told in str(caught.value)
    assert "or start a matching number of processes." in str(caught.value)


def test_launchers_are_named_by_their_commands() -> None:
    with pytest.raises(ConfigError, match="the launcher: srun started 2"):
        fitted(WorldConfig(num_workers=3), joined("slurm", (2,)))


def test_mpiruns_processes_need_a_name_for_a_place_that_lasts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launched = LaunchedProcess(
        launcher="mpirun", rank=1, world_size=2, local_rank=1, local_world_size=2
    )
    world = WorldConfig(file_store_path=str(tmp_path))
    config = TrainConfig(data=DataConfig(train_data="db"), world=world)
    assert train_launched(config, Environment(launched=launched)) == 2
    said = capsys.readouterr().err
    assert said.startswith("paceline: rank 1 of 2 on ")
    assert (
        "mpirun with --file_store_path, Redis or etcd needs --run_id, the same for all processes."
        in said
    )


def test_torchruns_own_store_leaves_a_given_rendezvous_unused() -> None:
    world = WorldConfig(file_store_path="meet", num_workers=2)
    config = TrainConfig(data=DataConfig(train_data="db"), world=world)
    told = "--file_store_path is ignored: rendezvous uses torchrun's own store."
    assert told in list(notes(config, 0, "torchrun"))
    assert told not in list(notes(config, 0, "mpirun"))


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "there is no command: give one, as in paceline launch"),
        (["-n", "2"], "there is no command: give one"),
        (["-n", "2", "--"], "there is no command: give one"),
        (["-n", "2", "no-such", "train.py"], "the command no-such isn't found: give a program"),
        (["--", "no-such-program"], "the command no-such-program isn't found: give a program"),
        (["--", "/etc/passwd"], "the command /etc/passwd isn't executable"),
    ],
)
def test_what_cant_be_launched_is_a_sentence(argv: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        main(argv)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        ["-n", "2"],
        ["--num_shards=1", "--run_id", "r"],
        ["--use_cpu"],
        ["--no-use-cpu"],
        ["--use_cpu", "yes"],
        [],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("between", [[], ["--"]], ids=["", "--"])
def test_flags_end_at_two_dashes_or_at_the_first_word_that_is_none(
    flags: list[str], between: list[str]
) -> None:
    command = ["python", "train.py", "-n", "3", "--", "more"]
    spelled = ["--num_workers" if flag == "-n" else flag for flag in flags]
    assert split([*flags, *between, *command]) == (spelled, command)


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert "paceline launch -n 2 -- python train.py" in capsys.readouterr().out


def test_flags_that_cant_be_are_refused_before_anything_starts() -> None:
    for flags, told in (
        (["-n", "-1"], "--num_workers -1: must be at least 0"),
        (["--num_shards", "2"], "--num_shards 2 needs a rendezvous"),
    ):
        with pytest.raises(ConfigError, match=told):
            main([*flags, "--", "true"])
