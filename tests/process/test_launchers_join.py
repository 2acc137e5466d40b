"""Processes of each launcher form one world: real torchrun and mpirun, srun's variables by hand."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from paceline.cluster.launchers.slurm import port_of
from tests.harness.network.ports import free_port
from tests.harness.processes.launcher_processes import (
    LAUNCHED_PROGRAM,
    LoggedProcess,
    Task,
    check_world,
    launched_programs,
    mpirun,
    srun_variables,
    torchrun,
)

HOST = os.uname().nodename


def statuses(tasks: list[Task]) -> list[int]:
    return [task.wait().status for task in tasks]


def test_torchruns_processes_are_a_world(tmp_path: Path) -> None:
    with torchrun(2, [*LAUNCHED_PROGRAM, "30", "sum"], tmp_path) as program:
        end = program.wait()
    assert end.status == 0, end.text
    check_world(tmp_path, "torchrun", [2])


def test_two_torchruns_are_two_machines(tmp_path: Path) -> None:
    place = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    argv = [*LAUNCHED_PROGRAM, "30", "sum"]
    with (
        torchrun(2, argv, tmp_path, *place, "--node-rank", "0") as first,
        torchrun(1, argv, tmp_path, *place, "--node-rank", "1") as second,
    ):
        ends = [first.wait(), second.wait()]
    assert [end.status for end in ends] == [0, 0], ends
    check_world(tmp_path, "torchrun", [2, 1])


def test_variables_set_by_hand_are_a_world_that_rank_0_hosts(tmp_path: Path) -> None:
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    variables = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in (1, 0)]
    with launched_programs(variables, tmp_path, "30", "sum") as tasks:
        assert statuses(tasks) == [0, 0]
    check_world(tmp_path, "torchrun", [2])


def test_a_restart_of_torchruns_is_a_world_of_its_own(tmp_path: Path) -> None:
    argv = [*LAUNCHED_PROGRAM, "30", "damage=1"]
    with torchrun(2, argv, tmp_path, "--max-restarts", "1", "--monitor-interval", "0.1") as program:
        end = program.wait()
    assert end.status != 0
    assert end.text.count(f"paceline: rank 1 on machine 0 ({HOST}): record 7 is damaged.") == 2


def test_mpiruns_processes_are_a_world(tmp_path: Path) -> None:
    with mpirun(3, [*LAUNCHED_PROGRAM, "30", "sum"], tmp_path) as program:
        end = program.wait()
    assert end.status == 0, end.text
    check_world(tmp_path, "mpirun", [3])


def test_one_machine_under_two_names_is_two_machines_to_mpirun(tmp_path: Path) -> None:
    hosts = ("-hosts", "localhost:2,127.0.0.1:1", "-launcher", "fork")
    with mpirun(3, [*LAUNCHED_PROGRAM, "30", "sum"], tmp_path, *hosts) as program:
        end = program.wait()
    assert end.status == 0, end.text
    check_world(tmp_path, "mpirun", [2, 1])


def mpich(rank: int, size: int) -> dict[str, str]:
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(size),
        "MPI_LOCALRANKID": str(rank),
        "MPI_LOCALNRANKS": str(size),
    }


def test_mpiruns_processes_meet_in_a_folder_where_flags_say(tmp_path: Path) -> None:
    (tmp_path / "meet").mkdir()
    for _ in range(2):  # the second start finds nothing of the first
        variables = [mpich(rank, 2) for rank in (0, 1)]
        with launched_programs(variables, tmp_path, "30", "sum", "meet") as tasks:
            assert statuses(tasks) == [0, 0]
        check_world(tmp_path, "mpirun", [2])
        assert list((tmp_path / "meet").iterdir()) == []


def test_a_killed_start_in_a_folder_misleads_nobody(tmp_path: Path) -> None:
    (tmp_path / "meet").mkdir()
    with launched_programs(srun_variables([3]), tmp_path, "30", "wait", "meet") as killed:
        for task in killed:
            task.wait_for_output("waiting")
    assert list((tmp_path / "meet").iterdir()) != []
    with launched_programs(srun_variables([3])[1:], tmp_path, "30", "sum", "meet") as followers:
        assert not psutil.wait_procs(
            [psutil.Process(task.process.pid) for task in followers], timeout=0.5
        )[0]
        with launched_programs(srun_variables([3])[:1], tmp_path, "30", "sum", "meet") as leader:
            assert statuses([*leader, *followers]) == [0, 0, 0]
    check_world(tmp_path, "slurm", [3])
    assert list((tmp_path / "meet").iterdir()) == []


@pytest.mark.parametrize("nodes", [[2], [1, 2]])
def test_sruns_tasks_are_a_world(tmp_path: Path, nodes: list[int]) -> None:
    with launched_programs(srun_variables(nodes), tmp_path, "30", "sum") as tasks:
        assert set(statuses(tasks)) == {0}
    check_world(tmp_path, "slurm", nodes)


def test_sruns_tasks_of_one_node_meet_at_a_port_of_their_own(tmp_path: Path) -> None:
    job = str(os.getpid())
    with launched_programs(srun_variables([2], job), tmp_path, "30", "sum", meet=False) as tasks:
        if tasks[0].wait().status == 2:
            assert f"MASTER_PORT: port {port_of(job, '0')} can't be opened" in tasks[0].text
            pytest.skip("that port is taken on this machine")
        assert statuses(tasks) == [0, 0]
    check_world(tmp_path, "slurm", [2])


def test_a_process_alone_is_the_whole_world(tmp_path: Path) -> None:
    with launched_programs([{}], tmp_path, "30", "sum", meet=False) as tasks:
        assert statuses(tasks) == [0]
    check_world(tmp_path, "alone", [1])


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_never_comes_is_named(tmp_path: Path, late: int) -> None:
    with launched_programs(srun_variables([3]), tmp_path, "2", f"late={late}") as tasks:
        ends = [task.wait(20) for rank, task in enumerate(tasks) if rank != late]
    assert [end.status for end in ends] == [1, 1]
    for end in ends:
        assert f"rank {late} of 3" in end.text
        assert "didn't come within 2 s: check their output, or give a longer" in end.text


def test_a_process_of_mpirun_that_never_comes_is_a_sentence(tmp_path: Path) -> None:
    with mpirun(2, [*LAUNCHED_PROGRAM, "3", "late=1"], tmp_path) as program:
        program.wait_for_output("not joined")
    assert "Some of the 2 processes that mpirun started didn't connect within 3 s" in program.text


def test_each_process_tells_the_cause_once(tmp_path: Path) -> None:
    with launched_programs(srun_variables([1, 2]), tmp_path, "30", "damage=1") as tasks:
        ends = [task.wait() for task in tasks]
    cause = f"rank 1 on machine 1 ({HOST})"
    assert [end.status for end in ends] == [1, 1, 1]
    assert ends[1].text == f"paceline: {cause}: record 7 is damaged.\n"
    for end, whom in ((ends[0], "rank 0 on machine 0"), (ends[2], "rank 2 on machine 1")):
        failed = f"ended because {cause} failed: record 7 is damaged."
        assert end.text == f"waiting\npaceline: {whom} ({HOST}): {failed}\n"


def test_rank_0s_own_word_is_heard_though_the_store_goes_with_it(tmp_path: Path) -> None:
    with launched_programs(srun_variables([2]), tmp_path, "30", "damage=0") as tasks:
        ends = [task.wait() for task in tasks]
    assert [end.status for end in ends] == [1, 1]
    assert "ended because rank 0 on machine 0" in ends[1].text


def test_a_mistake_that_all_find_is_said_once_a_machine(tmp_path: Path) -> None:
    with launched_programs(srun_variables([2, 1]), tmp_path, "30", "all mistaken") as tasks:
        ends = [task.wait() for task in tasks]
    assert [end.status for end in ends] == [2, 2, 2]
    assert "".join(end.text for end in ends).count("--seed -1: must be at least 0.") == 2
    assert "on machine 1" in ends[2].text


def test_a_store_that_dies_with_rank_0_leaves_the_others_their_own_word(tmp_path: Path) -> None:
    with launched_programs(srun_variables([2]), tmp_path, "30", "wait") as tasks:
        for task in tasks:
            task.wait_for_output("waiting")
        tasks[0].send(signal.SIGKILL)
        end = tasks[1].wait(20)
    assert end.status == 1
    assert f"paceline: rank 1 on machine 0 ({HOST}): " in end.text


def test_variables_that_contradict_each_other_are_a_sentence(tmp_path: Path) -> None:
    variables = {"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    argv = [sys.executable, "-m", "paceline.cli.main", "train", "--train_data", "none"]
    end = LoggedProcess(argv, tmp_path, variables).wait()
    assert end.status == 2
    assert "RANK 2 and WORLD_SIZE 2: RANK must be less than WORLD_SIZE" in end.text
