"""The end of a run of which a worker is frozen, or a supervisor was killed."""

from __future__ import annotations

import os
from pathlib import Path

from tests.harness.processes.command import all_end
from tests.harness.processes.fault_runs import FIRST_KILL, FaultRun, requires_exact

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
