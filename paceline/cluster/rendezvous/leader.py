"""Machine 0's part of a rendezvous: open a start, wait for all machines, write the world.

1. The run's last start, if there was one, must be over: none of its machines alive.
2. The new one takes its place by compare-and-set, so that of two that come at once one wins.
3. Once every machine has registered, and its lease advances, the world is written, and final.
"""

from __future__ import annotations

import secrets
import uuid
from contextlib import suppress

from paceline.cluster.membership.process_identity import ProcessIdentity
from paceline.cluster.rendezvous.deadline import Deadline, DeadlinePassed, describe_numbers
from paceline.cluster.rendezvous.lease_watch import LeaseWatch
from paceline.cluster.rendezvous.registered_machine import (
    STORE_LIMIT,
    RegisteredMachine,
    read_registrations,
)
from paceline.cluster.rendezvous.registration import RegisteredWorld, Registration, RunRecord
from paceline.cluster.rendezvous.run_plan import RunPlan
from paceline.cluster.stores.folder_store import FolderRemoved
from paceline.cluster.stores.store_spec import StoreSpec, erase, open_store, peek
from paceline.errors import ConfigError

# A run that was ended just now removes its entries
# within seconds, and the same command may come at once.
_ENDING_S = 15.0


def take_over(
    plan: RunPlan, rendezvous: StoreSpec, registration: Registration, deadline: Deadline
) -> str:
    """Make a new start the run's newest; return its id.

    Writes nothing before the run's record names the start, so that a killed process leaves no keys
    that the record doesn't lead to.

    Raises:
        ConfigError: the run is alive; names its machine.
    """
    record = RunRecord(generation=uuid.uuid4().hex, machines=plan.machines, leader=registration)
    while True:
        store = open_store(rendezvous, STORE_LIMIT, make=True)
        found = peek(store, "run")
        old = None if found is None else RunRecord.from_text(found)
        if old is not None:
            _wait_until_over(plan, rendezvous, old, registration.process, deadline)
        expected = "" if found is None else found.decode()
        desired = record.to_text()
        with suppress(FolderRemoved):  # just now, by the last machine of the run before
            if store.compare_set("run", expected, desired) == desired.encode():
                if old is not None:
                    # Only the winner removes the old start: the loser
                    # would remove what the winner's machines read.
                    erase(rendezvous.subspace(old.generation))
                return record.generation


def complete_world(registered: RegisteredMachine, deadline: Deadline) -> RegisteredWorld:
    """Wait for all machines and write the world.

    Raises:
        DeadlinePassed: a machine didn't come; names it.
    """
    registered.store.set(registered.key("machine"), registered.registration.to_text())
    watches: dict[int, LeaseWatch] = {}
    while missing := _missing(registered, watches):
        deadline.check_and_pause(describe_numbers("machine", missing, registered.plan.machines))
    registrations = tuple(
        watches[machine].registration for machine in range(registered.plan.machines)
    )
    world = RegisteredWorld(token=secrets.token_hex(16), registrations=registrations)
    registered.store.set("world", world.to_text())
    return world


def _missing(registered: RegisteredMachine, watches: dict[int, LeaseWatch]) -> list[int]:
    registrations = read_registrations(registered.store, "machine", registered.plan.machines)
    for machine, registration in registrations.items():
        # A machine may have come back under the same
        # number: its lease is watched from the beginning.
        if machine not in watches or watches[machine].registration != registration:
            watches[machine] = registered.watch(registration)
    return [
        machine
        for machine in range(registered.plan.machines)
        if machine not in registrations or watches[machine].verdict().state != "alive"
    ]


def _wait_until_over(
    plan: RunPlan,
    rendezvous: StoreSpec,
    old: RunRecord,
    own_process: ProcessIdentity,
    deadline: Deadline,
) -> None:
    """Wait until no machine of a start is alive; its machine 0 alive is an error at once."""
    store = open_store(rendezvous.subspace(old.generation), STORE_LIMIT)
    registrations = [*read_registrations(store, "machine", old.machines).values(), old.leader]
    entries = {registration.id: registration for registration in registrations}
    watches = [LeaseWatch(store, registration, own_process) for registration in entries.values()]
    end_deadline = deadline.sooner(_ENDING_S, "")
    while watches:
        verdicts = {watch: watch.verdict() for watch in watches}
        for watch, verdict in verdicts.items():
            if verdict.state == "alive" and watch.registration.id == old.leader.id:
                raise _in_use(plan, watch.registration, verdict.reason)
        watches = [watch for watch in watches if verdicts[watch].state != "dead"]
        if watches:
            try:
                end_deadline.check_and_pause(
                    f"the end of run {plan.run_id!r} on {watches[0].registration.process.host}"
                )
            except DeadlinePassed:
                reason = verdicts[watches[0]].reason
                raise _in_use(plan, watches[0].registration, reason) from None


def _in_use(plan: RunPlan, by: Registration, reason: str) -> ConfigError:
    return ConfigError(
        f"--run_id {plan.run_id} is in use by a live run on host {by.process.host} (process "
        f"{by.process.pid}; {reason}): choose another, or stop that run."
    )
