"""The end of a run of which a worker is frozen, or a supervisor was killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from torch import nn

from tests.harness.processes.command import Command, all_end
from tests.harness.processes.fault_runs import FIRST_KILL, TASK, FaultRun, requires_exact
from tests.harness.processes.run_folders import wait_until

HOST = os.uname().nodename


def test_a_run_ends_though_an_expelled_worker_stays_frozen(tmp_path: Path) -> None:
    run = FaultRun(tmp_path, "--sync", "allreduce", "--peer_timeout", "3")
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


def held(num_labels: int) -> nn.Module:
    """Never return: the worker waits before its first step, until its supervisor ends it."""
    Path(f"held.{os.getpid()}").touch()
    wait_until(lambda: False)
    raise AssertionError
