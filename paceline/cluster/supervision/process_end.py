"""How a process ends, normally or after a failure, and which process reports why.

A supervised worker leaves a failure report for its supervisor. A process of another launcher prints
its sentence, and writes it into the store as the first report on why the run ended. One that fails
only because a peer has ended waits there for the cause, up to two seconds (one after a timeout):

    paceline: rank 1 on machine 0 (a): record 7 is damaged.
    paceline: rank 0 on machine 0 (a): ended because rank 1 on machine 0 (a) failed: record 7 is …

The process that serves the store ends last, within a limit, so that the others can read it.
"""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress

from torch._C._distributed_c10d import TCPStore

from paceline.cluster.environment import WorkerEnvironment
from paceline.cluster.print_message import print_message
from paceline.cluster.rendezvous.process_rendezvous import START, FormedWorld
from paceline.cluster.rendezvous.registered_machine import STORE_LIMIT
from paceline.cluster.stores.failure_report import FAILURE, FailureReport, post
from paceline.cluster.stores.store_spec import (
    STORE_ERRORS,
    StoreSpec,
    erase,
    open_store,
    peek,
)
from paceline.cluster.stores.waiting import call_with_timeout
from paceline.cluster.supervision.supervisor_file import SupervisorFileLock, write_supervisor_file
from paceline.cluster.supervision.survival_mark import read_mark
from paceline.cluster.supervision.worker import declare_closed, report_error
from paceline.errors import CommTimeout

_CAUSE_S = 2.0
_PAUSE_S = 0.05


class ProcessEnd:
    """End of a process, normal or after a failure.

    This base class serves a single process, without supervisor or launcher.
    """

    def fail(self, error: BaseException) -> int:
        """Report why the process fails and deregister; return the exit status."""
        failure = FailureReport.of(error)
        print_message(failure.text)
        return failure.status

    def post_exit_status(self, status: int) -> None:
        """Report to the peers that the process is about to end with a status other than 0."""

    def close(self) -> None:
        """End normally: deregister, and wait for the others if this process cleans up."""


class SupervisedEnd(ProcessEnd):
    """End of a supervised worker: its supervisor prints the reason and serves the store.

    Args:
        place: the lock by which one process at a time is the worker, if this process has it.
    """

    def __init__(
        self, environment: WorkerEnvironment, place: SupervisorFileLock | None = None
    ) -> None:
        self._environment = environment
        self._place = place

    def fail(self, error: BaseException) -> int:
        return report_error(self._environment, error)

    def post_exit_status(self, status: int) -> None:
        failure = FailureReport.of_status(status)
        with suppress(OSError):  # the supervisor has ended
            write_supervisor_file(self._environment.error_file, failure.to_text())

    def close(self) -> None:
        if read_mark(self._environment.survival_mark) is not None:
            declare_closed()
        if self._place is not None:
            self._place.release()


class LaunchedEnd(ProcessEnd):
    """End of a process that another launcher, such as torchrun, started.

    Args:
        world: the world that the process is in.
        rendezvous: address of the job's space in the store; it contains the world's space.
        server: the store's server, if this process serves it; else None.
        cleans_up: whether this process waits until all others have left, and then cleans up.
        timeout: seconds that this process waits for the others after a normal end.
    """

    def __init__(
        self,
        world: FormedWorld,
        rendezvous: StoreSpec,
        server: TCPStore | None,
        *,
        cleans_up: bool,
        timeout: float,
    ) -> None:
        self._world = world
        self._rendezvous = rendezvous
        self._server = server
        self._cleans_up = cleans_up
        self._timeout = timeout
        group = world.group
        self._name = group.generation.describe(group.rank)

    def fail(self, error: BaseException) -> int:
        failure = FailureReport.of(error)
        # A process that timed out waits less: its report is in the store before the peers that only
        # lost their connection to it stop waiting.
        limit = _CAUSE_S / 2 if isinstance(error, CommTimeout) else _CAUSE_S
        status = call_with_timeout(2 * _CAUSE_S, lambda: self._report(failure, limit))
        if status is None:  # the store has gone with the process that served it
            print_message(f"{self._name}: {failure.text}")
            return failure.status
        call_with_timeout(2 * _CAUSE_S, lambda: self._deregister(_CAUSE_S))
        return status

    def post_exit_status(self, status: int) -> None:
        call_with_timeout(
            _CAUSE_S,
            lambda: post(self._world.store, FailureReport.of_status(status).by(self._name)),
        )

    def close(self) -> None:
        with suppress(*STORE_ERRORS):  # no process is left that needs it
            self._deregister(self._timeout)

    def _report(self, failure: FailureReport, limit: float) -> int:
        first = self._cause(limit) if failure.consequence else None
        if first is None:
            post(self._world.store, failure.by(self._name))
            # A mistake of all processes of a machine, such as a wrong flag, is printed once.
            digest = hashlib.sha256(failure.text.encode()).hexdigest()[:16]
            key = f"reported/{self._world.group.machine}/{digest}"
            if self._world.store.compare_set(key, "", self._name) == self._name.encode():
                print_message(f"{self._name}: {failure.text}")
            return failure.status
        process, _, description = first.text.partition(": ")
        reason = (description.splitlines() or [""])[-1]
        print_message(f"{self._name}: ended because {process} failed: {reason}")
        return first.status

    def _cause(self, limit: float) -> FailureReport | None:
        """Wait for another process's report on why the run ended."""
        deadline = time.monotonic() + limit
        while (text := peek(self._world.store, FAILURE)) is None:
            if time.monotonic() > deadline:
                return None
            time.sleep(_PAUSE_S)
        return FailureReport.from_text(text)

    def _deregister(self, limit: float) -> None:
        group = self._world.group
        store = self._world.store
        store.set(f"left/{group.rank}", "")
        if not self._cleans_up:
            return
        others = [f"left/{rank}" for rank in range(group.size)]
        deadline = time.monotonic() + limit
        while not store.check(others) and time.monotonic() < deadline:
            if peek(store, FAILURE) is not None:
                # After a failure the others need no longer than to read the cause.
                deadline = min(deadline, time.monotonic() + _CAUSE_S)
            time.sleep(_PAUSE_S)
        if not self._rendezvous.served_by_run:  # a folder or Redis keeps what is of this start
            job_store = open_store(self._rendezvous, STORE_LIMIT)
            if peek(job_store, START) == self._world.space.space.rpartition("/")[2].encode():
                job_store.delete_key(START)
            erase(self._world.space)
