"""`paceline train` under each launcher: the same run, the same losses; and what contradicts it."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import lmdb
import pytest

from tests.harness.processes.command import Result, rows_of, run
from tests.harness.processes.launcher_processes import LoggedProcess, mpirun, srun, torchrun
from tests.harness.processes.run_folders import event_files
from tests.harness.processes.tiny_run import make_database, steps_of, train

HOST = os.uname().nodename
ENDLESS = ("--num_epochs", "100000")


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_database(tmp_path_factory.mktemp("data"))


NOTIFIED = ("--sync", "notified")


@pytest.fixture(scope="module")
def supervised(database: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two workers under our own supervisor."""
    folder = tmp_path_factory.mktemp("supervised")
    words = train(database, "--num_workers", "2", "--run_id", "r", *NOTIFIED)
    ended = run(*words[2:], folder=folder)
    assert ended.status == 0, ended.text
    return folder / "runs" / "r"


def started(
    launcher: str, argv: Sequence[str], folder: Path
) -> AbstractContextManager[LoggedProcess | list[LoggedProcess]]:
    if launcher == "slurm":
        return srun(argv, folder)
    return (torchrun if launcher == "torchrun" else mpirun)(2, argv, folder)


def ends_of(launcher: str, argv: Sequence[str], folder: Path) -> list[Result]:
    with started(launcher, argv, folder) as programs:
        return [each.wait() for each in (programs if isinstance(programs, list) else [programs])]


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun", "slurm"])
def test_each_launchers_run_has_the_same_losses(
    launcher: str, database: str, supervised: Path, tmp_path: Path
) -> None:
    ends = ends_of(launcher, train(database, *NOTIFIED), tmp_path)
    assert {end.status for end in ends} == {0}, ends
    (made,) = (tmp_path / "runs").iterdir()  # rank 0 has chosen its name for both
    same = ("loss", "accuracy", "cumulative_input_count", "learning_rate")
    rows, wanted = (
        [[row[c] for c in same] for row in rows_of(path)] for path in (made, supervised)
    )
    assert rows == wanted
    assert len(rows) == 2
    for rank in (0, 1):
        assert steps_of(made, rank) == steps_of(supervised, rank)
    assert (made / "finished").exists()
    assert not list(made.glob(".alive*"))
    text = "".join(end.text for end in ends)
    assert text.count("Training resnet20: 2 workers on 1 machine") == 1


def test_two_nodes_are_two_machines_with_folders_of_their_own(
    database: str, tmp_path: Path
) -> None:
    own = {0: ["--output_dir", "out0"], 1: ["--output_dir", "out1"]}
    with srun(train(database, "--run_id", "r"), tmp_path, [1, 1], each=own) as programs:
        ends = [program.wait() for program in programs]
    assert [end.status for end in ends] == [0, 0], ends
    assert "2 workers on 2 machines" in ends[0].text
    rows = rows_of(tmp_path / "out0" / "r")
    assert rows[0]["cumulative_batch_count"] == "2"  # 8 images a step on both machines
    assert [len(event_files(tmp_path / "out1" / "r", rank)) for rank in (0, 1)] == [0, 1]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["--num_workers", "3"],
            "--num_workers 3: contradicts the launcher: srun started 2 on this machine",
        ),
        (["--output_dir", "/proc/none"], "--output_dir: /proc/none"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_mistake_is_said_once_and_nothing_is_written(
    database: str, tmp_path: Path, words: list[str], told: str
) -> None:
    with srun(train(database, *words), tmp_path) as programs:
        ends = [program.wait() for program in programs]
    assert [end.status for end in ends] == [2, 2]
    text = "".join(end.text for end in ends)
    assert told in text
    assert "Traceback" not in text
    assert sum(told in end.text and "ended because" not in end.text for end in ends) == 1
    assert not (tmp_path / "runs").exists()


def test_no_machine_writes_before_all_have_checked(database: str, tmp_path: Path) -> None:
    wrong = {1: ["--train_data", "missing"]}
    with srun(train(database, "--run_id", "r"), tmp_path, [1, 1], each=wrong) as programs:
        ends = [program.wait() for program in programs]
    assert [end.status for end in ends] == [2, 2], ends
    cause = "--train_data missing: there is no such database; check the path."
    assert f"paceline: rank 1 on machine 1 ({HOST}): {cause}" in ends[1].text
    assert f"ended because rank 1 on machine 1 ({HOST}) failed: {cause}" in ends[0].text
    assert not (tmp_path / "runs").exists()


def test_a_damaged_record_is_said_by_its_rank_and_the_others_tell_why_they_end(
    database: str, tmp_path: Path
) -> None:
    with lmdb.open(database, readonly=True, lock=False) as good, good.begin() as transaction:
        records = list(transaction.cursor())
    key, value = records[9]
    records[9] = (key, value[: len(value) // 2])
    with lmdb.open(str(tmp_path / "db")) as bad, bad.begin(write=True) as write:
        for record in records:
            write.put(*record)
    with srun(train(str(tmp_path / "db"), *ENDLESS), tmp_path) as programs:
        ends = [program.wait() for program in programs]
    assert [end.status for end in ends] == [1, 1]
    (teller,) = [rank for rank, end in enumerate(ends) if "ended because" not in end.text]
    other = ends[1 - teller]
    assert f"paceline: rank {teller} on machine 0 ({HOST}): " in ends[teller].text
    assert key.decode() in ends[teller].text
    assert f"ended because rank {teller} on machine 0 ({HOST}) failed: " in other.text
    assert key.decode() in other.text
    assert not any("Traceback" in end.text for end in ends)


def test_a_signal_to_one_rank_stops_all_with_its_status_and_leaves_a_checkpoint(
    database: str, tmp_path: Path
) -> None:
    with srun(train(database, *ENDLESS, "--run_id", "r"), tmp_path) as programs:
        programs[0].wait_for_output("epoch 1/")
        programs[1].process.send_signal(signal.SIGTERM)
        ends = [program.wait() for program in programs]
    assert [end.status for end in ends] == [128 + signal.SIGTERM] * 2, ends
    assert list((tmp_path / "runs" / "r" / "checkpoints").glob("*.pt"))
    assert not (tmp_path / "runs" / "r" / "finished").exists()


def test_a_live_run_is_refused_a_second_start_by_another_launcher(
    database: str, tmp_path: Path
) -> None:
    words = train(database, *ENDLESS, "--run_id", "r")
    with srun(words, tmp_path) as programs:
        programs[0].wait_for_output("epoch 1/")
        refused = run(*words[2:], "--num_workers", "2", folder=tmp_path)
    assert refused.status == 2
    assert "this run is active" in refused.text
