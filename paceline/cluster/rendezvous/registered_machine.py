"""A registered machine: its entries in one start of a run, its lease, and how it deregisters."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

from torch._C._distributed_c10d import Store

from paceline.cluster.membership.leases.heartbeat import Heartbeat
from paceline.cluster.membership.leases.lease import ENDED
from paceline.cluster.rendezvous.lease_watch import LeaseWatch, lease_key
from paceline.cluster.rendezvous.registration import RegisteredWorld, Registration, RunRecord
from paceline.cluster.rendezvous.run_plan import RunPlan
from paceline.cluster.rendezvous.start_events import StartEvents
from paceline.cluster.stores.failure_report import FAILURE, FailureReport
from paceline.cluster.stores.store_spec import (
    STORE_ERRORS,
    StoreSpec,
    erase,
    first_line,
    open_store,
    peek,
)

STORE_LIMIT = timedelta(seconds=10)
FINISHED = "finished"


class Finished(Exception):
    """Exception of a start that has nothing to do, because an earlier start finished the run."""


class RegisteredMachine:
    """One machine's registration in one start of a run; its lease is renewed from construction on.

    Args:
        plan: this machine's plan.
        rendezvous: address of the run's rendezvous, as this machine reaches it.
        start_id: the start's id, which names its space in the store.
        registration: this machine's registration.
        events: receives the failure that ended the run, and a note if the store is lost; None:
            neither is of interest.
    """

    def __init__(
        self,
        plan: RunPlan,
        rendezvous: StoreSpec,
        start_id: str,
        registration: Registration,
        events: StartEvents | None = None,
    ) -> None:
        self.plan = plan
        self.registration = registration
        self.rendezvous = rendezvous
        self.start_id = start_id
        self.space = rendezvous.subspace(start_id)
        self.store = open_store(self.space, STORE_LIMIT, make=self.is_machine_0)
        self.run_store = open_store(rendezvous, STORE_LIMIT)
        # The heartbeat has connections of its own: a wait on one blocks its other users.
        self._lease_store = open_store(self.space, STORE_LIMIT)
        self._run_lease_store = open_store(rendezvous, STORE_LIMIT)
        self._events = events
        self._failed = False  # and the failure is among the events
        self._heartbeat = Heartbeat(self)

    @property
    def is_machine_0(self) -> bool:
        """Whether this is machine 0."""
        return self.plan.machine == 0

    def watch(self, registration: Registration) -> LeaseWatch:
        """Watch another machine's lease."""
        return LeaseWatch(self.store, registration, self.registration.process)

    def abandon(self) -> None:
        """Deregister from a start that won't train, so that the next one finds the number free."""
        self._heartbeat.close()
        with suppress(*STORE_ERRORS):  # a store that is gone holds no entries
            if self.is_machine_0:
                self._remove_run()
            elif self._is_newest():
                self.store.set(lease_key(self.registration), ENDED)
            else:
                erase(self.space)  # as machine 0 did; our lease may have come back since

    def deregister(self) -> None:
        """Deregister from a world; the last machine removes what the run has in the store."""
        self._heartbeat.close()
        self.store.set(self.key("left"), "1")
        own = self.registration.id
        # Two machines may deregister last at once: one of them removes the start.
        if self.all_left() and self.store.compare_set("remover", "", own) == own.encode():
            self._remove_run()

    def all_left(self) -> bool:
        """Return whether all machines, this one too, have deregistered."""
        return self.store.check([f"left/{i}" for i in range(self.plan.machines)])

    def have_left(self) -> list[bool]:
        """Return for each machine whether it has deregistered."""
        return [self.store.check([f"left/{i}"]) for i in range(self.plan.machines)]

    def key(self, name: str) -> str:
        """Return the key of this machine's entry `name`."""
        return f"{name}/{self.plan.machine}"

    def beat(self, count: int) -> None:
        """Renew the lease, and look whether the run has failed."""
        self._lease_store.set(lease_key(self.registration), str(count))
        if self.is_machine_0:
            # Stores forget a key an hour after its last write, and `run` is written once.
            self._run_lease_store.set("beat", str(count))
        text = peek(self._lease_store, FAILURE)
        # The first report is the run's; each later beat finds it again.
        if text is not None and self._events is not None and not self._failed:
            self._events.put(FailureReport.from_text(text))
            self._failed = True

    def beat_failed(self, error: Exception) -> None:
        """Report that the store is lost."""
        if self._events is not None:
            self._events.put(
                f"the rendezvous is lost ({first_line(error)}); the run continues, but no other "
                "machine can join it."
            )

    def _remove_run(self) -> None:
        """Remove this start, and the run's record if it is this start's."""
        if not self.rendezvous.served_by_run:  # else its entries end with the server
            _remove_start(self.run_store, self.space, self.start_id)

    def _is_newest(self) -> bool:
        return _is_newest(self.run_store, self.start_id)


def deregister_orphaned(space: StoreSpec, machine: int) -> None:
    """Deregister a machine whose supervisor was killed; its last process does.

    Args:
        space: address of the start's space in the store.

    Raises:
        CommError: the store is lost, or another one of `STORE_ERRORS`.
    """
    store = open_store(space, STORE_LIMIT)
    text = peek(store, "world")
    if text is None or space.served_by_run:
        return
    store.set(f"left/{machine}", "1")
    world = RegisteredWorld.from_text(text).registrations
    own = f"orphan of machine {machine}"
    all_left = store.check([f"left/{number}" for number in range(len(world))])
    if all_left and store.compare_set("remover", "", own) == own.encode():
        run, _, start_id = space.space.rpartition("/")
        _remove_start(open_store(replace(space, space=run), STORE_LIMIT), space, start_id)


def _remove_start(run_store: Store, space: StoreSpec, start_id: str) -> None:
    """Remove a start, and the run's record if it is this start's."""
    newest = _is_newest(run_store, start_id)
    if newest:
        run_store.delete_key("run")
    if newest or peek(run_store, "run") is None:  # a beat may have come after the removal
        run_store.delete_key("beat")
    erase(space)


def _is_newest(run_store: Store, start_id: str) -> bool:
    text = peek(run_store, "run")
    return text is not None and RunRecord.from_text(text).generation == start_id


def read_registrations(store: Store, key_prefix: str, total: int) -> dict[int, Registration]:
    """Return the registrations that are there, by the machines' numbers or the processes' ranks."""
    texts = {number: peek(store, f"{key_prefix}/{number}") for number in range(total)}
    return {
        number: Registration.from_text(text) for number, text in texts.items() if text is not None
    }
