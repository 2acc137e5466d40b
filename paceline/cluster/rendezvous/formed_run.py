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
machine marks its run folder also where machine 0 is lost, or confirms nothing within seconds. Its
mark says so, and the next start of the run then asks machine 0, whose folder may have no mark.

Where the supervisor of a machine was killed, the machine's first worker marks the run folder, and
its last one deregisters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from contextlib import suppress
from dataclasses import dataclass

from torch._C._distributed_c10d import Store, TCPStore

from paceline.cluster.environment import WorkerEnvironment
from paceline.cluster.membership.generation import Generation, Group
from paceline.cluster.rendezvous.registered_machine import (
    FINISHED,
    STORE_LIMIT,
    RegisteredMachine,
)
from paceline.cluster.rendezvous.registration import RegisteredWorld
from paceline.cluster.stores.store_spec import (
    STORE_ERRORS,
    StoreSpec,
    first_line,
    open_store,
    peek,
)
from paceline.errors import CommError

_PAUSE_S = 0.05
_CONFIRM_S = 10.0  # that machine 0 has to confirm what all have agreed upon
_LOST_S = 1.0  # that a lost machine has to deregister, if it can

MarkFinished = Callable[[bool], None]
"""Marks a machine's run folder, given whether that of machine 0 is marked, too."""


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
            idle_timeout=plan.idle_timeout,
            error_file=error_file,
            survival_mark=survival_mark,
            runs_command=plan.runs_command,
        )

    def finish(
        self,
        mark_finished: MarkFinished,
        pause: Callable[[float], None],
        limit: float,
        *,
        agreed: bool = False,
        machine_0_lost: bool = False,
    ) -> None:
        """Mark the run as finished: machine 0 first, the others after it.

        Args:
            mark_finished: marks this machine's run folder.
            pause: sleeps; may raise to end the wait.
            limit: seconds to wait for machine 0.
            agreed: whether this machine's workers agreed with all others that the run is finished;
                then it is marked, whether machine 0 confirms it or not.
            machine_0_lost: whether the run continued without machine 0.

        Raises:
            PacelineError: the mark can't be written, or machine 0 was killed or reports nothing.
        """
        store = self.registered.store
        if self.registered.is_machine_0:
            _decide_finished(mark_finished, store)
        elif not agreed:
            self._await_finished(pause, limit)
            mark_finished(True)
        else:
            served = self.registered.rendezvous.served_by_run
            mark_finished(not machine_0_lost and _is_confirmed(store, pause, served_by_run=served))

    def deregister(
        self,
        pause: Callable[[float], None],
        timeout: float,
        *,
        lost: Container[int] = (),
    ) -> None:
        """Deregister; the machine that serves the store waits for the others, within a limit.

        Args:
            pause: sleeps; may raise to end the wait.
            timeout: seconds that the store's server waits for the other machines.
            lost: machines without which the run continued; they are not waited for for long.
        """
        # Before the wait: machines that wait for each other must see this one's entry.
        self.registered.deregister()
        if self.server is None:
            return
        began = time.monotonic()
        watches = [self.registered.watch(each) for each in self.world.registrations]
        while not self.registered.all_left() and (age := time.monotonic() - began) < timeout:
            states = [watch.verdict().state for watch in watches]
            left = self.registered.have_left()
            if all(
                # A lost machine's supervisor may be alive behind a cut link, and can't deregister.
                left[i] or state == "dead" or (i in lost and age > _LOST_S)
                for i, state in enumerate(states)
            ):
                return
            pause(_PAUSE_S)

    def _await_finished(self, pause: Callable[[float], None], limit: float) -> None:
        """Wait until machine 0 reports that the run is finished.

        A shared folder or Redis server that was lost in mid-run reports nothing, and is no error.
        """
        deadline = time.monotonic() + limit
        reason = ""
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
            # A folder or a server of its own isn't the
            # run's: its loss says nothing about machine 0.
            if not self.registered.rendezvous.served_by_run:
                return
            reason = f"its store is lost: {first_line(error)}"
        raise CommError(
            f"machine 0 ({self.generation.leader.host}) didn't confirm that the run is "
            f"finished ({reason}): start the same command again on all machines."
        )


def finish_orphaned(space: StoreSpec, group: Group, mark_finished: MarkFinished) -> None:
    """Mark the run as finished where the machine's supervisor was killed; its first worker does.

    Args:
        space: address of the start's space in the store.
        group: the ranks that reached the end, as the worker sees them.
        mark_finished: marks the machine's run folder.

    Raises:
        PacelineError: the mark can't be written.
    """
    store: Store | None = None
    with suppress(*STORE_ERRORS):  # lost, with the supervisor that served it, say
        store = open_store(space, STORE_LIMIT)
    if group.machine == 0:
        _decide_finished(mark_finished, store)
    elif store is None or 0 not in group.generation.machines:
        mark_finished(False)
    else:
        mark_finished(_is_confirmed(store, time.sleep, served_by_run=space.served_by_run))


def _decide_finished(mark_finished: MarkFinished, store: Store | None) -> None:
    """Mark machine 0's run folder, and let the others know."""
    mark_finished(True)
    if store is not None:
        with suppress(*STORE_ERRORS):  # the run doesn't need the store any more
            store.set(FINISHED, "1")


def _is_confirmed(store: Store, pause: Callable[[float], None], *, served_by_run: bool) -> bool:
    """Return whether machine 0 reports within seconds that the run is finished.

    A shared folder or Redis server that was lost in mid-run reports nothing; machine 0 has agreed.
    One that has come back empty is lost, too.
    """
    deadline = time.monotonic() + _CONFIRM_S
    try:
        while peek(store, FINISHED) is None:
            # The last machine that deregistered has removed the start: all had ended well.
            if peek(store, "world") is None:
                return not served_by_run
            if time.monotonic() > deadline:
                return False
            pause(_PAUSE_S)
    except STORE_ERRORS:
        return not served_by_run
    return True
