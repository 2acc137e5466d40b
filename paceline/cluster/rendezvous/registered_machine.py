"""A machine's place in one incarnation of a run: its claim, its beating lease, its leaving."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from torch._C._distributed_c10d import Store

from paceline.cluster.membership.heartbeat import Heartbeat
from paceline.cluster.membership.lease import ENDED
from paceline.cluster.membership.lease_watch import lease_key
from paceline.cluster.rendezvous.registration import MachineRegistration, RunRecord
from paceline.cluster.rendezvous.run_plan import RunPlan
from paceline.cluster.stores.store_spec import (
    STORE_ERRORS,
    StoreSpec,
    erase,
    open_store,
    peek,
    tidy,
)
from paceline.cluster.supervision.failure_report import FailureReport

STORE_LIMIT = timedelta(seconds=10)


class RegisteredMachine:
    """What a supervisor holds of an incarnation; its lease beats from construction on.

    Args:
        plan: this machine's part.
        meeting: the run's space, as this machine reaches it.
        generation: the incarnation's name.
        registration: this machine's entry.
        notice: told, from the heartbeat's thread, of the failure that ended the run.
        warn: told, from the heartbeat's thread, that the meeting place is lost.
    """

    def __init__(
        self,
        plan: RunPlan,
        meeting: StoreSpec,
        generation: str,
        registration: MachineRegistration,
        *,
        notice: Callable[[FailureReport], None],
        warn: Callable[[str], None],
    ) -> None:
        self.plan = plan
        self.generation = generation
        self.registration = registration
        self.meeting = meeting
        self.space = meeting.within(generation)
        self.store = open_store(self.space, STORE_LIMIT, make=self.leads)
        self.run_store = open_store(meeting, STORE_LIMIT)
        # The heartbeat has connections of its own: a wait on one blocks its other users.
        self._pulse = open_store(self.space, STORE_LIMIT)
        self._run_pulse = open_store(meeting, STORE_LIMIT)
        self._notice: Callable[[FailureReport], None] | None = notice
        self._heartbeat = Heartbeat(self._beat, lambda error: warn(_lost(error)))

    @property
    def leads(self) -> bool:
        """Whether this is machine 0."""
        return self.plan.machine == 0

    def post(self, failure: FailureReport) -> FailureReport:
        """Give a reason for the run's end; returns the one that came first."""
        text = self.store.compare_set("failure", "", failure.to_text())
        return FailureReport.from_text(text)

    def abandon(self) -> None:
        """Leave before the world stands, so that the next start finds the place free."""
        self._heartbeat.close()
        with suppress(*STORE_ERRORS):  # a store that is gone holds no place
            if self.leads:
                self._remove_run()
            elif self._is_newest():
                self.store.set(lease_key(self.registration), ENDED)
            else:
                self._clear()  # as machine 0 did; our lease may have come back since

    def leave(self) -> None:
        """Leave a world that stood; the last machine removes what the run has in the store."""
        self._heartbeat.close()
        self.store.set(self.key("left"), "1")
        if self.others_left() and self._wins("remover"):
            self._remove_run()

    def others_left(self) -> bool:
        """Tell whether all machines have left."""
        return self.store.check([f"left/{i}" for i in range(self.plan.machines)])

    def key(self, name: str, machine: int | None = None) -> str:
        """Return the key of a machine's record `name`; by default this machine's."""
        return f"{name}/{self.plan.machine if machine is None else machine}"

    def _wins(self, key: str) -> bool:
        return (
            self.store.compare_set(key, "", self.registration.id) == self.registration.id.encode()
        )

    def _remove_run(self) -> None:
        """Remove this incarnation, and the run's record if it is this incarnation's."""
        if self.meeting.kind == "tcp":
            return  # goes with its server
        if self._is_newest():
            self.run_store.delete_key("run")
            self.run_store.delete_key("beat")
        self._clear()

    def _clear(self) -> None:
        erase(self.space)
        tidy(self.meeting)

    def _is_newest(self) -> bool:
        text = peek(self.run_store, "run")
        return text is not None and RunRecord.from_text(text).generation == self.generation

    def _beat(self, count: int) -> None:
        self._pulse.set(lease_key(self.registration), str(count))
        if self.leads:
            self._run_pulse.set("beat", str(count))
        text = peek(self._pulse, "failure")
        if text is not None and self._notice is not None:
            self._notice(FailureReport.from_text(text))
            self._notice = None


def _lost(error: Exception) -> str:
    reason = str(error).splitlines()[0].rstrip(".")
    return f"the meeting place is lost ({reason}); the run goes on, but nobody new finds it."


def read_registrations(store: Store, machines: int) -> dict[int, MachineRegistration]:
    """Return the machines' entries that are there."""
    texts = {machine: peek(store, f"machine/{machine}") for machine in range(machines)}
    return {
        machine: MachineRegistration.from_text(text)
        for machine, text in texts.items()
        if text is not None
    }
