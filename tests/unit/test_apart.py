"""Processes that multiprocessing started, or a launcher, and that would train apart."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing

import paceline
from paceline.cluster.environment import Environment
from paceline.cluster.join import join_world
from paceline.cluster.launchers.launched_process import LaunchedProcess
from paceline.cluster.rendezvous.deadline import Deadline, DeadlinePassed, PrintedWaits
from paceline.cluster.stores.store_spec import StoreSpec, run_space
from paceline.cluster.supervision.supervisor_file import SupervisorFile, SupervisorFileLock
from tests.harness.processes.python_program import ROOT

FORK = multiprocessing.get_context("fork")  # a spawned process imports torch anew


def join_and_close(*_: object) -> None:
    paceline.join(device="cpu").close()


def in_child(function: Callable[..., Any], *arguments: object) -> int | None:
    """Call a function in a process of multiprocessing; return the exit status."""
    child = FORK.Process(target=function, args=arguments)
    child.start()
    child.join(60)
    return child.exitcode


def test_join_in_a_process_of_torchs_spawn_is_refused() -> None:
    with pytest.raises(torch.multiprocessing.ProcessRaisedException) as caught:
        torch.multiprocessing.start_processes(join_and_close, nprocs=1, start_method="fork")
    text = str(caught.value)
    assert "was started by torch.multiprocessing.spawn(), and no launcher describes it" in text
    assert "`paceline launch -n 2 -- python …`" in text
    assert "paceline.launch(train, …, workers=2)" in text


def test_join_in_another_process_of_multiprocessing_has_a_note(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert in_child(join_and_close) == 0
    note = capfd.readouterr().err
    assert note.startswith("paceline: this process was started by multiprocessing and is a world")
    assert "`paceline launch -n 2 -- python …`" in note


def test_join_in_a_task_of_a_pool_has_a_note(capfd: pytest.CaptureFixture[str]) -> None:
    with FORK.Pool(1) as pool:
        pool.map(join_and_close, [0])
    assert "is a world of one: it trains alone" in capfd.readouterr().err


def test_join_says_nothing_in_a_script_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    join_and_close()
    assert capfd.readouterr().err == ""


def lock_refused(path: str) -> None:
    sys.exit(SupervisorFileLock(path).taken)


def test_one_process_at_a_time_takes_a_workers_place() -> None:
    file = SupervisorFile("error file 0")
    place = SupervisorFileLock(file.path)
    assert not place.taken
    assert in_child(lock_refused, file.path) == 1
    place.release()
    assert in_child(lock_refused, file.path) == 0
    again = SupervisorFileLock(file.path)
    assert not again.taken
    again.release()
    file.close()
    assert not SupervisorFileLock(file.path).taken  # the supervisor has ended


def test_a_script_that_never_joins_says_so_at_its_end(tmp_path: Path) -> None:
    """A real process: a fork of the tests' server has imported the commands."""
    mpi = {"RANK": "0", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}
    variables = {f"OMPI_COMM_WORLD_{name}": value for name, value in mpi.items()}
    ended = subprocess.run(
        [sys.executable, "-c", "import torch, paceline"],
        cwd=tmp_path,
        env={**os.environ, **variables, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    assert ended.stderr == (
        "paceline: this process ended without paceline.join(): mpirun started 2 processes, and "
        "each worked as if it were the only one. Call paceline.join() in the script.\n"
    )


class Waits:
    """What is reported of a start's waits."""

    def __init__(self) -> None:
        self.reported: list[str] = []

    def report(self, awaited: str) -> None:
        self.reported.append(awaited)


def test_a_deadline_reports_nothing_at_first() -> None:
    waits = Waits()
    quiet = Deadline(0.3, "wait longer", waits=waits, quiet=60)
    with suppress(DeadlinePassed):
        while True:
            quiet.check_and_pause("rank 1 of 2")
    assert waits.reported == []
    loud = Deadline(60, "wait longer", waits=waits, quiet=0.2)
    while not waits.reported:
        loud.check_and_pause("rank 1 of 2")
    loud.check_and_pause("rank 1 of 2")
    assert waits.reported == ["rank 1 of 2"]


def test_what_a_start_waits_for_is_printed_with_what_the_user_can_do(
    capfd: pytest.CaptureFixture[str],
) -> None:
    PrintedWaits().report("rank 1 of 2")
    PrintedWaits("start it with paceline serve").report("the averaging server")
    assert capfd.readouterr().err.splitlines() == [
        "paceline: waiting for rank 1 of 2",
        "paceline: waiting for the averaging server: start it with paceline serve.",
    ]


def test_a_launched_process_that_waits_long_says_for_which_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("paceline.cluster.join._QUIET_S", 0.0)
    launched = LaunchedProcess(
        launcher="slurm", rank=0, world_size=2, local_rank=0, local_world_size=2
    )
    folder = StoreSpec(kind="folder", address=str(tmp_path), space=run_space("r"))
    with pytest.raises(paceline.CommError):
        join_world(
            Environment(launched=launched), first_iter_timeout=0.5, timeout=1, rendezvous=folder
        )
    assert capfd.readouterr().err == (
        "paceline: waiting for rank 1 of 2: srun's variables say that this process is rank 0 of 2. "
        "To train alone, start it without them: env -u SLURM_STEP_ID -u SLURM_PROCID …\n"
    )
