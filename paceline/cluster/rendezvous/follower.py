"""The other machines' part of a rendezvous: find the live incarnation, claim a place, wait.

The newest incarnation may be a dead run's, so it counts only while machine 0's lease advances. A
machine that finds a world sealed without it, or loses machine 0 before the seal, goes back to
waiting: the next start of the run is a new incarnation.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from paceline.cluster.membership.lease_watch import LeaseWatch
from paceline.cluster.membership.process_identity import ProcessIdentity
from paceline.cluster.rendezvous.deadline import Deadline, DeadlinePassed, name_machines
from paceline.cluster.rendezvous.finished import FINISHED, Finished
from paceline.cluster.rendezvous.registered_machine import (
    STORE_LIMIT,
    RegisteredMachine,
    read_registrations,
)
from paceline.cluster.rendezvous.registration import MachineRegistration, RegisteredWorld, RunRecord
from paceline.cluster.rendezvous.run_plan import RunPlan
from paceline.cluster.stores.store_spec import STORE_ERRORS, StoreSpec, open_store, peek
from paceline.cluster.supervision.failure_report import FailureReport
from paceline.errors import CommError, ConfigError


def follow(
    plan: RunPlan,
    registration: MachineRegistration,
    deadline: Deadline,
    sit: Callable[[str], RegisteredMachine],
) -> tuple[RegisteredMachine, RegisteredWorld]:
    """Find this machine's place in the run.

    Args:
        plan: this machine's part.
        registration: its entry.
        deadline: the limit.
        sit: takes a seat in the incarnation of a name.

    Returns:
        the seat, and the sealed world that it is in.

    Raises:
        ConfigError: the machines disagree on their number, or the place is taken.
        DeadlinePassed: a machine didn't come; names it.
        Finished: this machine was in the run before, and it is over.
    """
    meeting = plan.meeting
    assert meeting is not None
    if meeting.kind != "tcp":  # machine 0 serves that one, and may be yet to start
        open_store(meeting, STORE_LIMIT)
    while True:
        reason = ""
        try:
            live = _live_generation(meeting, registration, plan, deadline)
            if _finished(live, plan):
                with suppress(*STORE_ERRORS):  # somebody else has tidied up
                    sit(live.record.generation).leave()
                raise Finished
            if not _sealed_without_us(live, plan, registration.who, deadline):
                seated = _join(live, sit(live.record.generation), deadline)
                if seated is not None:
                    return seated
        except DeadlinePassed:
            raise
        except (CommError, DistError) as error:  # machine 0 went, and took the store with it
            reason = f" ({str(error).splitlines()[0].rstrip('.')})"
        deadline.wait(name_machines([0], plan.machines) + reason)


@dataclass(frozen=True, kw_only=True)
class _Live:
    """An incarnation whose machine 0 was just seen alive, or has finished the run."""

    text: bytes
    record: RunRecord
    store: Store
    leader: LeaseWatch


def _live_generation(
    meeting: StoreSpec, registration: MachineRegistration, plan: RunPlan, deadline: Deadline
) -> _Live:
    """Wait for an incarnation that is alive or finished."""
    store = open_store(meeting, STORE_LIMIT)
    live: _Live | None = None
    while True:
        text = peek(store, "run")
        if text is not None and (live is None or text != live.text):
            record = RunRecord.from_text(text)
            inside = open_store(meeting.within(record.generation), STORE_LIMIT)
            leader = LeaseWatch(inside, record.leader, registration.who)
            live = _Live(text=text, record=record, store=inside, leader=leader)
        if text is not None and live is not None and _standing(live, plan):
            return live
        deadline.wait(name_machines([0], plan.machines))


def _standing(live: _Live, plan: RunPlan) -> bool:
    return _finished(live, plan) or live.leader.verdict().state == "alive"


def _finished(live: _Live, plan: RunPlan) -> bool:
    """Tell whether the run is over; to a machine that is new in it, a run of that name isn't."""
    return plan.begun and peek(live.store, FINISHED) is not None


def _sealed_without_us(
    live: _Live, plan: RunPlan, here: ProcessIdentity, deadline: Deadline
) -> bool:
    """Tell whether the run is in its course and this machine's predecessor in it is gone."""
    text = peek(live.store, "world")
    if text is None:
        return False
    if live.record.machines != plan.machines:
        raise _disagree(plan, live.record)
    registration = RegisteredWorld.from_text(text).registrations[plan.machine]
    _refuse_live_holder(LeaseWatch(live.store, registration, here), plan, deadline)
    return True


def _join(
    live: _Live, registered: RegisteredMachine, deadline: Deadline
) -> tuple[RegisteredMachine, RegisteredWorld] | None:
    """Register and wait for the world; None if it will not form, or not with this machine."""
    try:
        if live.record.machines != registered.plan.machines:
            error = _disagree(registered.plan, live.record)
            registered.post(FailureReport.of(error))
            raise error
        _registration(registered, deadline)
        world = _await_world(registered, live, deadline)
    except BaseException:
        registered.abandon()
        raise
    if world is None:
        registered.abandon()
        return None
    return registered, world


def _registration(registered: RegisteredMachine, deadline: Deadline) -> None:
    key, own = registered.key("machine"), registered.registration.to_text()
    while (holder := registered.store.compare_set(key, "", own)) != own.encode():
        watch = LeaseWatch(
            registered.store, MachineRegistration.from_text(holder), registered.registration.who
        )
        _refuse_live_holder(watch, registered.plan, deadline)
        registered.store.compare_set(key, holder.decode(), own)


def _refuse_live_holder(holder: LeaseWatch, plan: RunPlan, deadline: Deadline) -> None:
    """Wait until the holder of this machine's number is known to be dead.

    Raises:
        ConfigError: it is alive.
    """
    host = holder.registration.who.host
    while (verdict := holder.verdict()).state == "unknown":
        deadline.wait(f"a sign of life of machine {plan.machine} ({host})")
    if verdict.state == "alive":
        raise ConfigError(
            f"--shard_id {plan.machine} of run {plan.run_id!r} is taken by a live machine, host "
            f"{host} ({verdict.reason}): give each machine its own."
        )


def _await_world(
    registered: RegisteredMachine, live: _Live, deadline: Deadline
) -> RegisteredWorld | None:
    while True:
        text = peek(registered.store, "world")
        if text is not None:
            world = RegisteredWorld.from_text(text)
            return world if registered.registration in world.registrations else None
        if peek(registered.run_store, "run") != live.text or live.leader.verdict().state == "dead":
            return None
        there = read_registrations(registered.store, registered.plan.machines)
        missing = [i for i in range(registered.plan.machines) if i not in there] or [0]
        deadline.wait(name_machines(missing, registered.plan.machines))


def _disagree(plan: RunPlan, record: RunRecord) -> ConfigError:
    return ConfigError(
        f"--num_shards {plan.machines} on machine {plan.machine}, but {record.machines} on "
        f"machine 0 ({record.leader.who.host}): give the same number on all machines."
    )
