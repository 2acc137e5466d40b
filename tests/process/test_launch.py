"""`paceline launch`: somebody's own command under our supervisor, with real signals."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.harness.network.ports import free_port
from tests.harness.processes.command import Command, Result, all_end, rows_of
from tests.harness.processes.launcher_processes import check_world
from tests.harness.processes.tiny_run import make_database, train

HOST = os.uname().nodename
LAUNCHED_PROGRAM = [sys.executable, "-m", "tests.harness.processes.launched_program"]
ROOT = str(Path(__file__).parents[2])


def start(folder: Path, *words: str) -> Command:
    return Command("launch", *words, folder=folder, environment={"PYTHONPATH": ROOT})


def launch(folder: Path, *words: str) -> Result:
    return start(folder, *words).wait()


def test_a_script_that_joins_finds_its_place(tmp_path: Path) -> None:
    ended = launch(tmp_path, "-n", "3", "--", *LAUNCHED_PROGRAM, "30", "sum")
    assert ended.status == 0, ended.text
    check_world(tmp_path, "paceline", [3])


def test_two_machines_scripts_are_a_world(tmp_path: Path) -> None:
    place = ("--num_shards", "2", "--run_id", "r", "--master", f"127.0.0.1:{free_port()}")
    command = ("--", *LAUNCHED_PROGRAM, "30", "sum")
    machines = [
        start(tmp_path, "-n", n, *place, "--shard_id", i, *command)
        for i, n in (("0", "1"), ("1", "2"))
    ]
    ends = [machine.wait() for machine in machines]
    assert [end.status for end in ends] == [0, 0], ends
    check_world(tmp_path, "paceline", [1, 2])


def test_a_command_that_asks_for_no_place_has_worked_apart(tmp_path: Path) -> None:
    ended = launch(tmp_path, "-n", "2", "--", "sh", "-c", "echo alike; cat")  # nothing to read
    assert ended.status == 1
    assert ended.text == (
        "alike\nalike\npaceline: the command ended without paceline.join(): its 2 processes worked "
        "apart, each as if it were the only one. Call paceline.join() before training, or start "
        "one process.\n"
    )


def test_one_process_need_not_join(tmp_path: Path) -> None:
    ended = launch(tmp_path, "-n", "1", "--", "echo", "alone")
    assert (ended.status, ended.text) == (0, "alone\n")


def test_two_machines_commands_that_never_join_have_worked_apart(tmp_path: Path) -> None:
    place = ("--num_shards", "2", "--run_id", "r", "--file_store_path", str(tmp_path))
    machines = [start(tmp_path, *place, "--shard_id", i, "--", "echo", "alike") for i in "01"]
    ends = [machine.wait() for machine in machines]
    assert [end.status for end in ends] == [1, 1], ends
    assert all("its 2 processes worked apart" in end.text for end in ends), ends


TWO_PROCESSES = """
import multiprocessing, sys, time, paceline

def join(refused):
    try:
        world = paceline.join(device="cpu")
    except paceline.ConfigError:
        refused.set()
        raise
    refused.wait(60)
    world.close()

context = multiprocessing.get_context("fork")
refused = context.Event()
processes = [context.Process(target=join, args=(refused,)) for _ in range(2)]
for process in processes:
    process.start()
for process in processes:
    process.join()
print(sorted(process.exitcode for process in processes))
"""


def test_two_processes_of_a_worker_dont_join_two_worlds(tmp_path: Path) -> None:
    ended = launch(tmp_path, "-n", "2", "--", sys.executable, "-c", TWO_PROCESSES)
    assert ended.status == 0, ended.text
    assert ended.text.count("[0, 1]\n") == 2
    sentence = "join() was called in two processes that one worker of `paceline launch` started"
    assert ended.text.count(sentence) == 2


def test_a_failing_scripts_status_is_the_launchs(tmp_path: Path) -> None:
    script = "echo 'my own words' >&2; exit 7"
    ended = launch(tmp_path, "--", "sh", "-c", script)
    assert ended.status == 7
    told = f"paceline: rank 0 on machine 0 ({HOST}) ended with status 7.\n"
    assert ended.text == f"my own words\n{told}"


def test_a_killed_script_is_named_with_its_signal(tmp_path: Path) -> None:
    ended = launch(tmp_path, "--", "sh", "-c", "kill -SEGV $$")
    assert ended.status == 1
    assert "was killed by SIGSEGV" in ended.text


def test_what_join_finds_wrong_is_said_once_by_the_supervisor(tmp_path: Path) -> None:
    ended = launch(tmp_path, "-n", "2", "--", *LAUNCHED_PROGRAM, "30", "damage=1")
    assert ended.status == 1
    assert ended.text.count("record 7 is damaged.") == 1
    assert f"paceline: rank 1 on machine 0 ({HOST}): record 7 is damaged." in ended.text


WAITS = "sleep 1000 & echo up; wait"


def family_of(command: Command, workers: int) -> list[psutil.Process]:
    for _ in range(workers):
        command.line_with("up")
    return command.family()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_scripts_and_their_children(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    command = start(tmp_path, "-n", "2", "--", "sh", "-c", WAITS)
    family = family_of(command, 2)
    assert len(family) == 6  # of each worker: the guard, the shell, its sleep
    command.send(number)
    assert command.wait(limit=10).status == status
    assert all_end(family)


def test_scripts_end_with_a_killed_supervisor(tmp_path: Path) -> None:
    command = start(tmp_path, "-n", "2", "--", "sh", "-c", WAITS)
    family = family_of(command, 2)
    command.send(signal.SIGKILL)
    assert all_end(family)
    command.wait(limit=10)


def test_the_others_end_with_a_failed_script(tmp_path: Path) -> None:
    script = f"mkdir first 2> /dev/null && exit 3; {WAITS}"
    ended = launch(tmp_path, "-n", "2", "--", "sh", "-c", script)
    assert ended.status == 3
    assert ended.text.count("ended with status 3") == 1


def test_a_command_that_cant_be_started_is_a_sentence(tmp_path: Path) -> None:
    ended = launch(tmp_path, "--", "no-such-program")
    assert ended.status == 2
    assert "paceline: the command no-such-program isn't found" in ended.text
    (tmp_path / "text").write_text("no program\n")
    (tmp_path / "text").chmod(0o755)
    ended = launch(tmp_path, "--", "./text")
    assert ended.status == 2
    assert "./text can't be started: Exec format error" in ended.text


def test_train_under_launch_is_a_run_as_any_other(tmp_path: Path) -> None:
    database = make_database(tmp_path)
    ended = launch(tmp_path, "-n", "2", "--", sys.executable, *train(database, "--run_id", "r"))
    assert ended.status == 0, ended.text
    assert "2 workers on 1 machine" in ended.text
    assert len(rows_of(tmp_path / "runs" / "r")) == 2
    wrong = train(database, "--run_id", "r", "--num_workers", "3")
    ended = launch(tmp_path, "-n", "2", "--", sys.executable, *wrong)
    assert ended.status == 2
    assert (
        ended.text.count("--num_workers 3: contradicts the launcher: paceline launch started 2")
        == 1
    )
