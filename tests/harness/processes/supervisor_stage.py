"""Supervisors whose workers obey the test: it sends each an order, and waits for its end.

A worker connects to the stage when it is up. Its children inherit the connection, so it closes when
the worker and all of its children have ended: a test waits for that without polling.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Self

from paceline.cluster.environment import WorkerEnvironment
from paceline.cluster.rendezvous.formed_run import FormedRun
from paceline.cluster.rendezvous.run_plan import RunPlan
from paceline.cluster.stores.failure_report import FailureReport
from paceline.cluster.supervision import parent_death_watchdog
from paceline.cluster.supervision.event_queue import EventQueue
from paceline.cluster.supervision.machine_endpoint import WorkerExit
from paceline.cluster.supervision.supervisor import supervise
from paceline.cluster.supervision.supervisor_file import write_supervisor_file

LIMIT = 30.0
LIGHT = "tests.harness.processes.light_worker"
FULL = "tests.harness.processes.full_worker"
SURVIVING = "tests.harness.processes.surviving_worker"
_WRAPPER = [sys.executable, "-I", "-S", parent_death_watchdog.__file__]


class Actor:
    """A worker that obeys the test's orders.

    Attributes:
        pid: its process.
        environment: what its supervisor has put into its environment.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("r")
        self.pid = int(self.receive_line())
        self.environment = WorkerEnvironment.from_text(self.receive_line())

    def send_order(self, order: str) -> None:
        self._connection.sendall(f"{order}\n".encode())

    def obey(self, *orders: str) -> None:
        """Send orders, each once the worker has confirmed the one before."""
        for order in orders:
            self.send_order(order)
            assert self.receive_line() == order.split()[0]

    def receive_line(self) -> str:
        """Return the worker's next line; "" if it ended."""
        return self._lines.readline().strip()

    def write_failure_report(self, failure: FailureReport) -> None:
        """Write the worker's failure report; the worker doesn't end yet."""
        write_supervisor_file(self.environment.error_file, failure.to_text())

    def fail(self, error: Exception) -> None:
        """Let the worker end with a report of this error."""
        failure = FailureReport.of(error)
        self.write_failure_report(failure)
        self.send_order(f"exit {failure.status}")

    def ended(self, within: float = LIMIT) -> bool:
        """Wait until the worker and its children have ended."""
        self._connection.settimeout(within)
        try:
            return self.receive_line() == ""
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False

    def stays(self, seconds: float) -> bool:
        """Return whether the worker neither ends nor sends a line within the time."""
        return not wait([self._connection], timeout=seconds)

    def close(self) -> None:
        self._lines.close()
        self._connection.close()


@dataclass(kw_only=True)
class Supervisor:
    """A running supervisor, as the test holds it."""

    process: BaseProcess
    log: Path

    def send(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def status(self, within: float = LIMIT) -> int | None:
        """Wait for its end; None if it doesn't come."""
        self.process.join(within)
        return self.process.exitcode

    @property
    def text(self) -> str:
        """What it and its workers have printed until now."""
        return self.log.read_text()


class Stage:
    """Starts supervisors and receives their workers; kills what is left of both at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(LIMIT)
        self._supervisors: list[Supervisor] = []
        self._actors: list[Actor] = []

    def start(
        self,
        plan: RunPlan,
        worker: str = LIGHT,
        *,
        finish: Path | None = None,
        exits: Path | None = None,
        wrapped: bool = False,
    ) -> Supervisor:
        """Start a machine's supervisor.

        Args:
            plan: its part of the run.
            worker: the workers' module.
            finish: the file by which it marks the end of the run.
            exits: the file into which its endpoint writes the ends of workers.
            wrapped: whether each worker has a wrapper, as in `paceline launch`.
        """
        log = self.folder / f"supervisor{len(self._supervisors)}.log"
        argv = [sys.executable, "-m", worker, str(self._listener.getsockname()[1])]
        argv = [*_WRAPPER, *argv] if wrapped else argv
        process = get_context("forkserver").Process(
            target=_supervise, args=(plan, argv, str(log), finish, exits)
        )
        log.touch()
        process.start()
        supervisor = Supervisor(process=process, log=log)
        self._supervisors.append(supervisor)
        return supervisor

    def actors(self, count: int) -> list[Actor]:
        """Wait for so many workers; return them by machine and local rank."""
        new = []
        for _ in range(count):
            self._await_one()
            connection, _ = self._listener.accept()
            connection.settimeout(LIMIT)
            new.append(Actor(connection))
        self._actors += new
        return sorted(
            new, key=lambda actor: (actor.environment.machine, actor.environment.local_rank)
        )

    def _await_one(self) -> None:
        running = [s for s in self._supervisors if s.process.exitcode is None]
        ready = wait([self._listener, *(s.process.sentinel for s in running)], timeout=LIMIT)
        assert self._listener in ready, f"no worker came up; ready: {ready}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for supervisor in self._supervisors:
            print(f"--- {supervisor.log.name}\n{supervisor.text}")  # shown if the test failed
            supervisor.process.kill()
            supervisor.process.join()
        for actor in self._actors:
            actor.close()
        self._listener.close()


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Require the block to be done in time."""
    begin = os.times().elapsed
    yield
    taken = os.times().elapsed - begin
    assert taken <= seconds, f"took {taken:.1f} s, not {seconds:g}"


class _Exits:
    """Supervisor's endpoint that writes into a file what it reports."""

    def __init__(self, path: Path, run: FormedRun, events: EventQueue) -> None:
        self._path, self._generation = path, run.generation
        self._members = [member.id for member in run.generation.members]

    def name_of(self, member: str) -> str:
        return self._generation.describe(self._members.index(member))

    def exited(self, end: WorkerExit) -> None:
        assert end.member in self._members
        with self._path.open("a") as file:
            file.write(f"{end.local_rank} {'failed' if end.failed else 'well'}: {end.text}\n")

    def end_run(self, failure: FailureReport) -> None:
        with self._path.open("a") as file:
            file.write(f"run ends: {failure.text}\n")

    def is_lost(self, machine: int) -> bool:
        return False

    def ended_without(self, member: str) -> bool:
        return False

    def await_change(self, limit: float) -> None:
        pass

    def close(self) -> None:
        with self._path.open("a") as file:
            file.write("closed\n")


def _supervise(
    plan: RunPlan, argv: list[str], log: str, finish: Path | None, exits: Path | None
) -> None:
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    endpoint = partial(_Exits, exits) if exits else None

    def mark(confirmed: bool) -> None:
        assert finish is not None
        finish.write_text("confirmed" if confirmed else "unconfirmed")

    marks = mark if finish else None
    sys.exit(supervise(plan, argv, finish=marks, open_endpoint=endpoint))
