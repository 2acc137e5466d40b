"""A run that stands: what a supervisor does with it until it leaves."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from paceline.cluster.environment import WorkerEnvironment
from paceline.cluster.membership.members import Members
from paceline.cluster.rendezvous.finished import FINISHED, await_finished
from paceline.cluster.rendezvous.registered_machine import RegisteredMachine
from paceline.cluster.rendezvous.registration import GenerationInfo
from paceline.cluster.stores.store_spec import STORE_ERRORS
from paceline.cluster.supervision.failure_report import FailureReport


class FormedRun:
    """This machine's part in a formed run.

    Args:
        registered: its place in the incarnation.
        generation_info: the world.
        server: the TCP store, where this machine serves it.
    """

    def __init__(
        self,
        registered: RegisteredMachine,
        generation_info: GenerationInfo,
        server: TCPStore | None,
    ) -> None:
        self._registered = registered
        self.generation_info = generation_info
        self._server = server

    def members(self, local_rank: int) -> Members:
        """Return the world as one of this machine's workers sees it."""
        return Members.on(
            self._registered.plan.machine,
            local_rank,
            machines=self.generation_info.machines,
            addresses=self.generation_info.addresses,
            hosts=self.generation_info.hosts,
        )

    def worker(self, local_rank: int, error_file: Path) -> WorkerEnvironment:
        """Return what a worker is told of its place."""
        plan = self._registered.plan
        return WorkerEnvironment(
            run_id=plan.run_id,
            generation=self._registered.generation,
            machine=plan.machine,
            machines=plan.machines,
            local_rank=local_rank,
            local_world_size=plan.workers,
            store=self._registered.space,
            first_iter_timeout=plan.first_iter_timeout,
            timeout=plan.timeout,
            error_file=str(error_file),
            command=plan.command,
        )

    def post(self, failure: FailureReport) -> FailureReport:
        """Give this machine's reason for the run's end; returns the run's, which came first."""
        return self._registered.post(failure)

    def finish(
        self, write: Callable[[], None], pause: Callable[[float], None], limit: float
    ) -> None:
        """Write down that the run is finished: machine 0 first, the others when it says so.

        Args:
            write: writes it down on this machine.
            pause: sleeps; may raise to end the wait.
            limit: seconds to wait for machine 0.

        Raises:
            PacelineError: it can't be written, or machine 0 was killed or says nothing.
        """
        if not self._registered.leads:
            await_finished(self._registered, self.generation_info.hosts[0], pause, limit)
        write()
        if self._registered.leads:
            with suppress(*STORE_ERRORS):  # the run doesn't need its meeting place any more
                self._registered.store.set(FINISHED, "1")

    def leave(self, pause: Callable[[float], None], linger: float) -> None:
        """Leave the run; whoever serves the store stays until all have left, within a limit.

        Args:
            pause: sleeps; may raise to end the wait.
            linger: seconds that the store's server waits for the other machines.
        """
        self._registered.leave()
        deadline = time.monotonic() + linger
        while (
            self._server is not None
            and not self._registered.others_left()
            and time.monotonic() < deadline
        ):
            pause(0.05)
