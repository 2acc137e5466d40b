"""A run after its rendezvous: how its machines agree that it is finished, and deregister.

Machine 0, where the run's state is, decides that the run is finished:

    machine 0                                 machine i
    its workers have ended well               its workers have ended well
    mark its run folder
    write `finished` into the store  ──────▶  mark its run folder
    deregister                                deregister

So a mark on another machine means that machine 0 has one. A machine that was killed before its mark
comes back with the same command and reads `finished` in the store, or from `answer_finished`.

Workers that survive the loss of a process agree among themselves that the run is finished. Their
machine then waits for no other: it marks its run folder, and writes `finished` itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from torch._C._distributed_c10d import TCPStore

from paceline.cluster.environment import WorkerEnvironment
from paceline.cluster.membership.generation import Generation
from paceline.cluster.rendezvous.registered_machine import FINISHED, RegisteredMachine
from paceline.cluster.rendezvous.registration import RegisteredWorld
from paceline.cluster.stores.store_spec import STORE_ERRORS, first_line, peek
from paceline.errors import CommError

_PAUSE_S = 0.05


@dataclass(frozen=True, kw_only=True)
class FormedRun:
    """One machine's part in a formed run.

    Attributes:
        registered: this machine's registration in the start.
        world: the registrations of all machines.
        generation: the first generation of the start.
        server: the TCP store's server, if this machine serves it; else None.
    """

    registered: RegisteredMachine
    world: RegisteredWorld
    generation: Generation
    server: TCPStore | None

    def worker_environment(
        self, local_rank: int, error_file: str, survival_mark: str = ""
    ) -> WorkerEnvironment:
        """Return what to pass to a worker."""
        plan = self.registered.plan
        return WorkerEnvironment(
            run_id=plan.run_id,
            start_id=self.registered.start_id,
            machine=plan.machine,
            local_rank=local_rank,
            store=self.registered.space,
            first_iter_timeout=plan.first_iter_timeout,
            timeout=plan.timeout,
            error_file=error_file,
            survival_mark=survival_mark,
            runs_command=plan.runs_command,
        )

    def finish(
        self,
        mark_finished: Callable[[], None],
        pause: Callable[[float], None],
        limit: float,
        *,
        agreed: bool = False,
    ) -> None:
        """Mark the run as finished: machine 0 first, the others after it.

        Args:
            mark_finished: marks this machine's run folder.
            pause: sleeps; may raise to end the wait.
            limit: seconds to wait for machine 0.
            agreed: whether this machine's workers agreed with all others that the run is finished;
                then no machine is waited for.

        Raises:
            PacelineError: the mark can't be written, or machine 0 was killed or reports nothing.
        """
        decides = agreed or self.registered.is_machine_0
        if not decides:
            self._await_finished(pause, limit)
        mark_finished()
        if decides:
            with suppress(*STORE_ERRORS):  # the run doesn't need the store any more
                self.registered.store.set(FINISHED, "1")

    def deregister(self, pause: Callable[[float], None], timeout: float) -> None:
        """Deregister; the machine that serves the store waits for the others, within a limit.

        A machine that is lost is not waited for.

        Args:
            pause: sleeps; may raise to end the wait.
            timeout: seconds that the store's server waits for the other machines.
        """
        self.registered.deregister()
        if self.server is None:
            return
        deadline = time.monotonic() + timeout
        watches = [self.registered.watch(each) for each in self.world.registrations]
        while not self.registered.all_left() and time.monotonic() < deadline:
            states = [watch.verdict().state for watch in watches]
            left = self.registered.have_left()
            if all(left[i] or state == "dead" for i, state in enumerate(states)):
                return
            pause(_PAUSE_S)

    def _await_finished(self, pause: Callable[[float], None], limit: float) -> None:
        """Wait until machine 0 reports that the run is finished.

        A shared folder or Redis server that was lost in mid-run reports nothing, and is no error.
        """
        deadline, reason = time.monotonic() + limit, ""
        try:
            watch = self.registered.watch(self.world.registrations[0])
            while not reason:
                verdict = watch.verdict()  # before the report is read: it may come last
                if peek(self.registered.store, FINISHED) is not None:
                    return
                if verdict.state == "dead" or time.monotonic() > deadline:
                    reason = verdict.reason
                else:
                    pause(_PAUSE_S)
        except STORE_ERRORS as error:
            if not self.registered.rendezvous.served_by_run:
                return
            reason = f"its store is lost: {first_line(error)}"
        raise CommError(
            f"machine 0 ({self.generation.leader.host}) didn't confirm that the run is "
            f"finished ({reason}): start the same command again on all machines."
        )
