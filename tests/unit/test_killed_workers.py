"""What a supervisor reports of workers that don't end at once when it kills them."""

from __future__ import annotations

import signal
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.cluster.rendezvous.run_plan import RunPlan
from paceline.cluster.rendezvous.server_registration import PARAMETERS
from paceline.cluster.stores.failure_report import FailureReport
from paceline.cluster.supervision import machine_workers
from paceline.cluster.supervision.event_queue import EventQueue, Exited
from paceline.cluster.supervision.machine_workers import MachineWorkers
from paceline.cluster.supervision.server_command import ServerCommand
from paceline.errors import PeerLost
from tests.harness.processes.worlds import world_of


class SlowToEnd:
    """A worker whose end is an event some time after SIGKILL."""

    def __init__(self, events: EventQueue, seconds: float, *, in_kernel: bool) -> None:
        event = Exited(local_rank=0, returncode=-signal.SIGKILL)
        self._end = threading.Timer(seconds, events.put, [event])
        self._in_kernel = in_kernel

    def send(self, number: signal.Signals) -> None:
        if number == signal.SIGKILL:
            self._end.start()

    def hangs(self) -> bool:
        return self._in_kernel

    def close(self) -> None:
        self._end.cancel()


@pytest.mark.parametrize(
    ("seconds", "in_kernel", "reported"),
    [
        (0.3, False, []),  # a zombie that a busy machine reaps late
        (60, True, ["paceline: rank 0 on machine 0 (a) can't be killed: a system call hangs."]),
        (60, False, ["paceline: rank 0 on machine 0 (a) did not end within 0.5 s after SIGKILL."]),
    ],
)
def test_only_a_worker_in_the_kernel_cant_be_killed(
    seconds: float,
    in_kernel: bool,
    reported: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, limit in {"_TERM_S": 0.05, "_KILL_S": 0.1, "_REAP_S": 0.5}.items():
        monkeypatch.setattr(machine_workers, name, limit)
    events = EventQueue()
    run = cast(Any, SimpleNamespace(generation=world_of().generation))
    workers = MachineWorkers(RunPlan(), run, events)
    worker = SlowToEnd(events, seconds, in_kernel=in_kernel)
    workers._workers = {0: cast(Any, worker)}
    workers._end()
    worker.close()
    events.close()
    assert capfd.readouterr().err.splitlines() == reported


@pytest.mark.parametrize("order", [(1, 0), (0, 1)])
def test_a_killed_server_is_the_cause_also_where_its_worker_is_seen_to_end_first(
    order: tuple[int, int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine_workers, "_CAUSE_S", 0.1)
    events = EventQueue()
    run = cast(Any, SimpleNamespace(generation=world_of().generation))
    servers = ServerCommand(argv=(), role=PARAMETERS, count=1)
    workers = MachineWorkers(RunPlan(workers=1), run, events, servers=servers)
    lost = FailureReport.of(PeerLost("the connection to the parameter server ended."))
    ends = {
        rank: SimpleNamespace(
            report=lambda name, own=own: own, survives=own is None, send=lambda number: None
        )
        for rank, own in enumerate((lost, None))
    }
    workers._workers = cast(Any, ends)
    for local_rank in order:
        returncode = (1, -signal.SIGKILL)[local_rank]
        events.put(Exited(local_rank=local_rank, returncode=returncode))
    reason = workers._first_failure()
    events.close()
    assert reason is not None
    assert reason.text.startswith("the parameter server on machine 0 (a) was killed by SIGKILL.")
    said = capfd.readouterr().err
    assert said.endswith("The workers save their state, and the run ends.\n") == (order == (1, 0))
