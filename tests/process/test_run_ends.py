"""The end of a run of which a worker is frozen, or a supervisor was killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from torch import nn

from tests.harness.processes.command import Command, Result, all_end, rows_of
from tests.harness.processes.fault_runs import FIRST_KILL, TASK, FaultRun, requires_exact
from tests.harness.processes.run_folders import wait_until, wait_until_step

HOST = os.uname().nodename
TWO_MACHINES = (
    *("train", *TASK, "--model", "tests.harness.processes.fault_runs:observed", "--run_id", "r"),
    *("--sync", "allreduce", "--batch_size", "6", "--num_workers", "1"),
    *("--num_shards", "2", "--file_store_path", "meet"),
)
RUNS = [Path(f"out{machine}/r") for machine in (0, 1)]


def test_a_run_ends_though_an_expelled_worker_stays_frozen(tmp_path: Path) -> None:
    run = FaultRun(tmp_path, "--sync", "allreduce", "--peer_timeout", "8")
    run.reach(FIRST_KILL)
    workers = run.workers()
    workers[1].suspend()
    run.release()
    ended = run.wait()
    assert ended.status == 0, ended.text
    last = f"paceline: the run is finished; it continued without rank 1 on machine 0 ({HOST})."
    assert ended.text.splitlines()[-1] == last
    assert (run.run_folder / "finished").exists()
    assert not (run.run_folder / "members").exists()
    assert all_end(workers)
    requires_exact(run)


def test_a_run_whose_supervisor_is_killed_before_it_survives_that_says_so(tmp_path: Path) -> None:
    words = ("--model", f"{__name__}:held", "--run_id", "r", "--num_workers", "3")
    command = Command("train", *TASK, *words, folder=tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("held.*"))) == 3)
    workers = command.family()
    command.send(signal.SIGKILL)
    ended = command.wait()
    assert all_end(workers)
    assert ended.text.splitlines()[-1] == (
        "paceline: the supervisor of machine 0 was killed before the run could outlive it: start "
        "the same command again."
    )
    assert ended.text.count("was killed") == 1
    assert "Traceback" not in ended.text


def start(folder: Path, epochs: int) -> list[Command]:
    """Start both machines, which have output folders of their own."""
    words = (*TWO_MACHINES, "--num_epochs", str(epochs))
    return [
        Command(*words, "--shard_id", str(m), "--output_dir", f"out{m}", folder=folder)
        for m in (0, 1)
    ]


def started(folder: Path) -> list[Command]:
    """Start both machines, and return in the middle of the run."""
    (folder / "meet").mkdir()
    machines = start(folder, 5)
    wait_until_step(folder / RUNS[0], FIRST_KILL, generation=0)
    return machines


def last_lines(ends: list[Result]) -> list[str]:
    return [end.text.splitlines()[-1] for end in ends]


def epochs_of(run: Path) -> int:
    """Return the epochs that a run's log has."""
    return int(rows_of(run)[-1]["epoch"]) + 1


def test_a_worker_ends_its_machines_part_of_the_run_without_the_supervisor(tmp_path: Path) -> None:
    machines = started(tmp_path)
    machines[0].send(signal.SIGKILL)
    (tmp_path / "killed").touch()
    ends = [machine.wait() for machine in machines]
    assert [end.status for end in ends] == [-signal.SIGKILL, 0], ends
    for run in RUNS:
        assert (tmp_path / run / "finished").read_text() == "finished\n"
        assert not (tmp_path / run / "members").exists()
        assert not list((tmp_path / run).glob(".alive*"))
    assert list((tmp_path / "meet").iterdir()) == []
    ends = [machine.wait() for machine in start(tmp_path, 5)]
    assert [end.status for end in ends] == [0, 0], ends
    finished = (
        "paceline: run r is finished; give another --run_id to train again, or more --num_epochs."
    )
    assert last_lines(ends) == [finished, finished]
    ends = [machine.wait() for machine in start(tmp_path, 6)]  # continues after its end
    assert [end.status for end in ends] == [0, 0], ends
    assert epochs_of(tmp_path / RUNS[0]) == 6
    assert all((tmp_path / run / "finished").exists() for run in RUNS)


@pytest.mark.parametrize("epochs", [5, 6])
def test_the_folder_of_machine_0_decides_whether_the_run_is_finished(
    tmp_path: Path, epochs: int
) -> None:
    machines = started(tmp_path)
    machines[0].kill_all()
    (tmp_path / "killed").touch()
    ends = [machine.wait() for machine in machines]
    assert [end.status for end in ends] == [-signal.SIGKILL, 0], ends
    assert not (tmp_path / RUNS[0] / "finished").exists()
    assert (tmp_path / RUNS[1] / "finished").exists()
    ends = [machine.wait() for machine in start(tmp_path, epochs)]
    assert [end.status for end in ends] == [0, 0], ends
    assert not any("is finished" in end.text for end in ends), ends
    for run in RUNS:
        assert (tmp_path / run / "finished").read_text() == "finished\n"
    assert list((tmp_path / "meet").iterdir()) == []


def held(num_labels: int) -> nn.Module:
    """Never return: the worker waits before its first step, until its supervisor ends it."""
    Path(f"held.{os.getpid()}").touch()
    wait_until(lambda: False)
    raise AssertionError
